"""Results as a picture. Needs matplotlib, which is loaded only here."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tidegate.base.errors import ConfigError
from tidegate.bench.report import RunResult
from tidegate.bench.table import rate_text, slo_text
from tidegate.slo.goodput import GOODPUT_ATTAINMENT, Metric, Slo


def load_matplotlib() -> Any:
    """``matplotlib.figure``. Raises ConfigError where it is not installed."""
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from None


def plot(runs: Sequence[RunResult], slos: Sequence[Slo], title: str, path: Path) -> None:
    """Attainment over the rate, and for each run which share of the requests had at most which TTFT and pace.

    ``slos`` are all of one metric, which is the pace shown.
    """
    figure = load_matplotlib().Figure(figsize=(15, 4.5), layout="constrained")
    overview, ttft, pace = figure.subplots(1, 3)
    figure.suptitle(title)
    rated = [run for run in runs if run.offered_rate is not None]
    for slo in slos:
        rates = [run.offered_rate for run in rated]
        overview.plot(rates, [run.attained(slo) for run in rated], marker="o", label=slo_text(slo))
    overview.axhline(GOODPUT_ATTAINMENT, color="grey", linestyle=":")
    overview.set(xlabel="requests/s", ylabel="attainment", ylim=(-0.03, 1.03))
    of_gaps = slos[0].metric is Metric.GAP
    for run in runs:
        latencies = [request.latency for request in run.each if request.latency is not None]
        paces = [latency.gap_p99_s if of_gaps else latency.tpot_s for latency in latencies]
        _cumulative(ttft, [latency.ttft_s for latency in latencies], rate_text(run.offered_rate))
        _cumulative(pace, paces, rate_text(run.offered_rate))
    for slo in slos:
        ttft.axvline(slo.ttft_s * 1e3, color="grey", linestyle=":")
        pace.axvline(slo.tpot_s * 1e3, color="grey", linestyle=":")
    ttft.set(xlabel="TTFT, ms", ylabel="share of requests", xscale="log")
    pace.set(xlabel="p99 gap of a request, ms" if of_gaps else "TPOT, ms", ylabel="share of requests")
    for axes in (overview, ttft, pace):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _cumulative(axes: Any, values_s: Sequence[float], label: str) -> None:
    ordered = sorted(value * 1e3 for value in values_s)
    axes.step(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], where="post", label=label)
