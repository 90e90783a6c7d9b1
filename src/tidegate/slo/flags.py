"""Flags of several commands that say what an SLO is."""

import argparse

from tidegate.slo.goodput import Metric


def add_slo_metric(group: "argparse._ActionsContainer", more: str = "") -> None:
    """``more``: what follows of it for this command, as further sentences."""
    group.add_argument(
        "--slo-metric",
        default=Metric.TPOT.value,
        choices=[metric.value for metric in Metric],
        help=f"what the SLO's tpot limits: a request's mean TPOT, or its p99 gap{more} (default: tpot)",
    )
