"""The arguments of ``tidegate simulate``. Names are those of ``tidegate serve`` and ``tidegate bench``."""

import argparse
import math
from collections.abc import Callable
from typing import TypeVar

from tidegate.bench.arguments import add_workload, positive, share, whole
from tidegate.bench.plan import Amount
from tidegate.policy.modes import MODES
from tidegate.policy.order import ORDERS
from tidegate.sim.engine import Host
from tidegate.sim.fleet import ROUTERS
from tidegate.slo.accuracy import KINDS
from tidegate.slo.flags import add_slo_metric
from tidegate.slo.gates import GATES

Value = TypeVar("Value")
HOST = Host()


def add_arguments(command: argparse.ArgumentParser) -> None:
    _add_device(command.add_argument_group("device"))
    _add_load(add_workload(command))
    _add_scheduling(command.add_argument_group("scheduling"))
    _add_results(command.add_argument_group("results"))


def _add_device(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--truth",
        required=True,
        metavar="MODEL",
        help="how long batches take: a latency model's JSON file, or rough:N for N prompt tokens per second",
    )
    group.add_argument("--belief", metavar="MODEL", help="what the gate believes of that (default: the truth)")
    group.add_argument(
        "--noise",
        type=_not_negative,
        default=0.0,
        metavar="SIGMA",
        help="of each batch's time, as the standard deviation of its logarithm (default: 0)",
    )
    group.add_argument(
        "--factors",
        type=_factors,
        default={},
        metavar="KIND=X,...",
        help="by which steps of a kind take longer than the model says, as a server has learned (prediction_factors in "
        f"/admin/stats); kinds: {', '.join(KINDS)}",
    )
    for name, seconds, about in (
        ("--launch-ms", HOST.launch_s, "from a launch to its start on an idle lane"),
        ("--lead-ms", HOST.lead_s, "before its end that the next batch is made; 0: after it"),
        ("--deliver-ms", HOST.deliver_s, "from a token to the client"),
    ):
        ms = seconds * 1e3
        group.add_argument(name, type=_not_negative, default=ms, metavar="MS", help=f"{about} (default: {ms:g})")
    group.add_argument("--block-size", type=whole, default=16, metavar="TOKENS", help="of a KV block (default: 16)")
    group.add_argument(
        "--num-gpu-blocks-override", type=whole, default=55_000, metavar="N", help="KV blocks (default: 55000)"
    )
    group.add_argument("--engines", type=whole, default=1, metavar="N", help="such devices (default: 1)")
    group.add_argument(
        "--router",
        default="round-robin",
        choices=sorted(ROUTERS),
        help="which engine a request goes to (default: round-robin)",
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--rate",
        type=_list(positive),
        metavar="R",
        help="requests per second (default: a trace's own times, or the mean of the steps' rates)",
    )
    group.add_argument("--speedup", type=positive, default=1.0, metavar="X", help="of a trace's own times (default: 1)")
    amount = group.add_mutually_exclusive_group()
    amount.add_argument("--num-requests", type=whole, metavar="N")
    amount.add_argument(
        "--seconds",
        type=positive,
        metavar="S",
        help=f"of arrivals (default: {Amount.DEFAULT_SECONDS:g}, or the whole trace)",
    )


def _add_scheduling(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--mode", type=_list(_mode), default=["auto"], metavar="MODE", help=f"{', '.join(MODES)} (default: auto)"
    )
    group.add_argument("--order", choices=ORDERS, help="of waiting prompts (default: slack)")
    group.add_argument("--gate", choices=GATES, help="who sets shares and slices (default: the mode's own)")
    group.add_argument(
        "--slo",
        default="ttft=500ms,tpot=50ms",
        metavar="LIMITS",
        help="what to hold and to measure by (default: ttft=500ms,tpot=50ms)",
    )
    add_slo_metric(group)
    group.add_argument(
        "--prefill-share",
        type=_list(share),
        default=[0.5],
        metavar="SHARE",
        help="prefill's part of the compute while decode runs too, where the gate is static (default: 0.5)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=_list(whole),
        default=[8192],
        metavar="N",
        help="tokens in a batch at most (default: 8192)",
    )
    group.add_argument(
        "--slice-ms", type=positive, default=30.0, metavar="MS", help="time that a slice may take (default: 30)"
    )
    for name, count, about in (
        ("--max-prefill-tokens", 2048, "prompt tokens that the device takes in a batch"),
        ("--max-num-seqs", 512, "requests on the device at once"),
        ("--min-slice-tokens", 128, "prompt tokens that a slice has at least"),
        ("--slice-quantum-tokens", 64, "of which slices are multiples"),
        ("--max-slices", 16, "prompts in a batch"),
    ):
        group.add_argument(name, type=whole, default=count, metavar="N", help=f"{about} (default: {count})")
    group.add_argument("--max-waiting", type=whole, metavar="N", help="requests that may wait (default: no limit)")
    group.add_argument(
        "--max-model-len", type=whole, metavar="TOKENS", help="longest prompt plus output (default: the workload's)"
    )


def _add_results(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--goodput",
        action="store_true",
        help="search for the highest rate that 90 %% of the requests attain the SLO at",
    )
    group.add_argument(
        "--sweep",
        action="store_true",
        help="--mode, --max-num-batched-tokens, --prefill-share and --rate are lists such as 512,2048: simulate every "
        "combination, and print a table",
    )
    group.add_argument("--json", action="store_true", help="print everything as JSON")


def _list(of: Callable[[str], Value]) -> Callable[[str], list[Value]]:
    def parse(text: str) -> list[Value]:
        return [of(part) for part in text.split(",")]

    parse.__name__ = of.__name__.strip("_")  # named in argparse's message
    return parse


def _not_negative(text: str) -> float:
    if not 0 <= float(text) < math.inf:
        raise argparse.ArgumentTypeError("it must be 0 or more")
    return float(text)


def _factors(text: str) -> dict[str, float]:
    factors = {}
    for part in text.split(","):
        kind, _, value = part.partition("=")
        if kind not in KINDS:
            raise argparse.ArgumentTypeError(f"unknown kind of step {kind!r}; choose among {', '.join(KINDS)}")
        factors[kind] = positive(value)
    return factors


def _mode(text: str) -> str:
    if text not in MODES:
        raise argparse.ArgumentTypeError(f"unknown mode {text!r}; choose one of {', '.join(MODES)}")
    return text
