"""``tidegate bench serve``: the command line of the load generator."""

import argparse
import contextlib
import math
import re
import resource
from pathlib import Path
from typing import Any, cast

import msgspec
import uvloop

from tidegate import __version__
from tidegate.base.clock import wall_s
from tidegate.base.errors import ConfigError
from tidegate.bench.client import Client
from tidegate.bench.load import Limits
from tidegate.bench.payload import PATHS, Endpoint, Payloads
from tidegate.bench.plan import Amount, Lengths, find_workload
from tidegate.bench.plot import load_matplotlib, plot
from tidegate.bench.report import Goodput, RunResult, goodputs
from tidegate.bench.screen import Screen, say
from tidegate.bench.session import Measurement, first_model, measure
from tidegate.bench.table import sweep_text
from tidegate.bench.traces import Trace
from tidegate.bench.workloads import WORKLOADS
from tidegate.slo.goodput import Metric, Slo

_DEFAULT_SLO = Slo(ttft_s=0.5, tpot_s=0.05)


class Saved(msgspec.Struct, frozen=True):
    """The file that --save writes. ``runs`` and ``goodputs``: see ``bench.report``."""

    tidegate: str
    started: float  # seconds since the epoch
    settings: dict[str, Any]
    runs: list[RunResult]
    goodputs: list[Goodput]


def add_bench(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command ``bench``; ``run`` carries it out."""
    bench = commands.add_parser("bench", help="measure a running server", description="Measure a running server.")
    kinds = bench.add_subparsers(dest="bench", required=True, metavar="KIND")
    serve = kinds.add_parser(
        "serve",
        help="send requests to a server and report its latencies and goodput",
        description="Send requests to a server that speaks OpenAI's API, at random times (open loop), and report TTFT, "
        "TPOT, gaps, throughput, attainment of SLOs and goodput. Prompts are random, so use another --seed for a "
        "second measurement of a server that caches prefixes.",
    )
    _add_server(serve)
    _add_load(serve)
    _add_results(serve)


def run(arguments: argparse.Namespace) -> int:
    """The exit code: 0 when any request was answered. Raises ConfigError and TidegateError."""
    if arguments.plot:
        load_matplotlib()
    for path in filter(None, (arguments.save, arguments.plot)):
        if not path.parent.is_dir():
            raise ConfigError(f"There is no directory {path.parent} to write {path.name} to.")
    _allow_many_connections()
    return uvloop.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> int:
    started = wall_s()
    measurement = _measurement(arguments)
    client = Client(arguments.url, arguments.api_key)
    with contextlib.closing(client):
        model = arguments.model or await first_model(client)
        payloads = Payloads(
            model=model,
            endpoint=cast(Endpoint, arguments.endpoint),
            vocab_size=arguments.vocab_size,
            seed=arguments.seed,
            ignore_eos=arguments.ignore_eos,
            include_usage=arguments.usage,
        )
        title = f"{model} at {arguments.url}, workload {arguments.workload}"
        say(title)
        runs = await measure(client, payloads, measurement, Screen())
    found = goodputs(runs)
    if len(runs) > 1:
        say("\n" + sweep_text(runs, found))
    if arguments.save:
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
        settings |= {"model": model, "api_key": None}
        saved = Saved(__version__, started, settings, runs, found)
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
        rates=arguments.rate or ([] if has_times else [1.0]),
        amount=Amount(arguments.num_requests, arguments.seconds),
        slos=[msgspec.structs.replace(slo, metric=metric) for slo in arguments.slo or [_DEFAULT_SLO]],
        limits=Limits(arguments.timeout, arguments.max_concurrency, all_expected=arguments.ignore_eos),
        speedup=arguments.speedup,
        stop_below=arguments.stop_below,
    )


def _allow_many_connections() -> None:
    """Each request that is running has a connection, so raise the number of open files as far as allowed."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems say "unlimited" and do not mean it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# ---- arguments


def _add_server(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("server")
    group.add_argument("--url", default="http://127.0.0.1:8000", help="(default: http://127.0.0.1:8000)")
    group.add_argument("--model", metavar="NAME", help="(default: the first that the server has)")
    group.add_argument("--endpoint", default="completions", choices=list(PATHS), help="(default: completions)")
    group.add_argument("--api-key", metavar="KEY")
    group.add_argument(
        "--vocab-size",
        type=_whole,
        default=32000,
        metavar="N",
        help="prompts are random token ids up to N - 1 (default: 32000)",
    )
    group.add_argument(
        "--usage",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask the server to count the tokens, to check the number of events against (default: on)",
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for outputs of full length; shorter ones have failed (default: on)",
    )


def _add_load(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("load")
    group.add_argument(
        "--workload",
        default="conv",
        metavar="NAME|FILE",
        help=f"{', '.join(WORKLOADS)}; or a trace: Azure's CSV, Mooncake's JSON lines, or CSV lines "
        '"input,output" (default: conv)',
    )
    group.add_argument(
        "--rate",
        type=_rates,
        metavar="R[,R...]",
        help="requests per second, one run for each; inf: all at once (default: a trace's own times, else 1)",
    )
    group.add_argument(
        "--speedup", type=_positive, default=1.0, metavar="X", help="of a trace's own times (default: 1)"
    )
    amount = group.add_mutually_exclusive_group()
    amount.add_argument("--num-requests", type=_whole, metavar="N", help="in each run")
    amount.add_argument(
        "--seconds",
        type=_positive,
        metavar="S",
        help=f"of arrivals in each run (default: {Amount.DEFAULT_SECONDS:g}, or the whole trace)",
    )
    group.add_argument("--prompt-tokens", type=_whole, metavar="N", help="the same length for all prompts")
    group.add_argument("--output-tokens", type=_whole, metavar="N", help="the same length for all outputs")
    group.add_argument("--max-concurrency", type=_whole, metavar="N", help="requests at once; others wait unmeasured")
    group.add_argument("--timeout", type=_positive, default=600.0, metavar="S", help="of a request (default: 600)")
    group.add_argument("--seed", type=int, default=0, help="of lengths, prompts and times (default: 0)")


def _add_results(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("results")
    group.add_argument(
        "--slo",
        type=_slo,
        action="append",
        metavar="ttft=T,tpot=T",
        help='such as "ttft=500ms,tpot=25ms"; may be repeated (default: ttft=500ms,tpot=50ms)',
    )
    group.add_argument(
        "--slo-metric",
        default=Metric.TPOT.value,
        choices=[metric.value for metric in Metric],
        help="what the SLO's tpot limits: a request's mean TPOT or its p99 gap. Both are reported; this one comes "
        "first, is drawn, and is what --stop-below looks at (default: tpot)",
    )
    group.add_argument(
        "--stop-below",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="try no higher rate once no SLO is attained by this share of the requests (default: 0, try all)",
    )
    group.add_argument("--save", type=Path, metavar="FILE.json", help="write all results")
    group.add_argument("--plot", type=Path, metavar="FILE.png", help="draw attainment and latencies (needs matplotlib)")


def _whole(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("it must be 1 or more")
    return number


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError("it must be more than 0")
    return number


def _rates(text: str) -> list[float]:
    """ "2,4,inf" as numbers."""
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of rates such as 2,4,8") from None
    if not all(rate > 0 for rate in rates):
        raise argparse.ArgumentTypeError("rates must be more than 0")
    return sorted(set(rates))


def _slo(text: str) -> Slo:
    """ "ttft=500ms,tpot=0.025s" as an SLO."""
    parts = dict(re.findall(r"(\w+)=([\d.]+(?:ms|s))(?:,|$)", text))
    if parts.keys() != {"ttft", "tpot"} or text.count(",") != 1:
        raise argparse.ArgumentTypeError(f'{text!r} is not an SLO such as "ttft=500ms,tpot=25ms"')
    return Slo(_seconds(parts["ttft"]), _seconds(parts["tpot"]))


def _seconds(text: str) -> float:
    if text.endswith("ms"):
        return float(text.removesuffix("ms")) / 1000
    return float(text.removesuffix("s"))
