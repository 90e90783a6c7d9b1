"""``tidegate bench serve``: the command line of the load generator."""

import argparse
import contextlib
from typing import Any

import msgspec

from tidegate import __version__
from tidegate.base.clock import wall_s
from tidegate.bench.arguments import (
    add_files,
    add_server,
    add_workload,
    pattern,
    payloads,
    positive,
    settings,
    slo,
    whole,
)
from tidegate.bench.client import Client
from tidegate.bench.load import Limits
from tidegate.bench.plan import Amount, Lengths, find_workload, own_rates
from tidegate.bench.plot import plot
from tidegate.bench.report import Goodput, RunResult, goodputs
from tidegate.bench.screen import Screen, say
from tidegate.bench.session import Measurement, first_model, measure
from tidegate.bench.table import sweep_text
from tidegate.bench.traces import Trace
from tidegate.slo.flags import add_slo_metric
from tidegate.slo.goodput import Metric, Slo

_DEFAULT_SLO = Slo(ttft_s=0.5, tpot_s=0.05)


class Saved(msgspec.Struct, frozen=True):
    """The file that --save writes. ``runs`` and ``goodputs``: see ``bench.report``."""

    tidegate: str
    started: float  # seconds since the epoch
    settings: dict[str, Any]
    runs: list[RunResult]
    goodputs: list[Goodput]


def add_command(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    serve = kinds.add_parser(
        "serve",
        help="send requests to a server and report its latencies and goodput",
        description="Send requests to a server that speaks OpenAI's API, at random times (open loop), and report TTFT, "
        "TPOT, gaps, throughput, attainment of SLOs and goodput. Prompts are random, so use another --seed for a "
        "second measurement of a server that caches prefixes.",
    )
    add_server(serve)
    _add_load(add_workload(serve))
    _add_results(serve)
    serve.set_defaults(measure=_run)


async def _run(arguments: argparse.Namespace) -> int:
    started = wall_s()
    measurement = _measurement(arguments)
    client = Client(arguments.url, arguments.api_key)
    with contextlib.closing(client):
        model = arguments.model or await first_model(client)
        title = f"{model} at {arguments.url}, workload {arguments.workload}"
        say(title)
        runs = await measure(client, payloads(arguments, model), measurement, Screen())
    found = goodputs(runs)
    if len(runs) > 1:
        say("\n" + sweep_text(runs, found))
    if arguments.save:
        saved = Saved(__version__, started, settings(arguments, model), runs, found)
        arguments.save.write_bytes(msgspec.json.format(msgspec.json.encode(saved), indent=1))
    if arguments.plot:
        plot(runs, measurement.slos, title, arguments.plot)
    return 0 if any(run.failed < run.requests for run in runs) else 1


def _measurement(arguments: argparse.Namespace) -> Measurement:
    workload = find_workload(arguments.workload)
    metric = Metric(arguments.slo_metric)
    has_times = isinstance(workload, Trace) and workload.timed
    return Measurement(
        workload=workload,
        lengths=Lengths(arguments.prompt_tokens, arguments.output_tokens),
        rates=arguments.rate or own_rates(workload) or ([] if has_times else [1.0]),
        amount=Amount(arguments.num_requests, arguments.seconds),
        slos=[msgspec.structs.replace(each, metric=metric) for each in arguments.slo or [_DEFAULT_SLO]],
        limits=Limits(arguments.timeout, arguments.max_concurrency, all_expected=arguments.ignore_eos),
        speedup=arguments.speedup,
        stop_below=arguments.stop_below,
        pattern=pattern(arguments),
    )


# ---- arguments


def _add_load(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--rate",
        type=_rates,
        metavar="R[,R...]",
        help="requests per second, one run for each; inf: all at once (default: a trace's own times, the mean of the "
        "steps' rates, else 1)",
    )
    group.add_argument("--speedup", type=positive, default=1.0, metavar="X", help="of a trace's own times (default: 1)")
    amount = group.add_mutually_exclusive_group()
    amount.add_argument("--num-requests", type=whole, metavar="N", help="in each run")
    amount.add_argument(
        "--seconds",
        type=positive,
        metavar="S",
        help=f"of arrivals in each run (default: {Amount.DEFAULT_SECONDS:g}, or the whole trace)",
    )
    group.add_argument("--max-concurrency", type=whole, metavar="N", help="requests at once; others wait unmeasured")
    group.add_argument("--timeout", type=positive, default=600.0, metavar="S", help="of a request (default: 600)")


def _add_results(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("results")
    group.add_argument(
        "--slo",
        type=slo,
        action="append",
        metavar="ttft=T,tpot=T",
        help='such as "ttft=500ms,tpot=25ms"; may be repeated (default: ttft=500ms,tpot=50ms)',
    )
    add_slo_metric(group, ". Both are reported; this one comes first, is drawn, and is what --stop-below looks at")
    group.add_argument(
        "--stop-below",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="try no higher rate once no SLO is attained by this share of the requests (default: 0, try all)",
    )
    add_files(group, "attainment and latencies")


def _rates(text: str) -> list[float]:
    """ "2,4,inf" as numbers."""
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of rates such as 2,4,8") from None
    if not all(rate > 0 for rate in rates):
        raise argparse.ArgumentTypeError("rates must be more than 0")
    return sorted(set(rates))
