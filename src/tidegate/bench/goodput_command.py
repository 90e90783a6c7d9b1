"""``tidegate bench goodput``: the command line of the search for goodput."""

import argparse
import asyncio
import contextlib
import math
import re
from typing import Any

import msgspec

from tidegate.base.clock import wall_s
from tidegate.base.errors import ConfigError, TidegateError
from tidegate.bench.admin import Admin, Value
from tidegate.bench.arguments import (
    add_files,
    add_server,
    add_workload,
    pattern,
    payloads,
    positive,
    seconds,
    settings,
    share,
    slo,
)
from tidegate.bench.client import Client
from tidegate.bench.confidence import looks
from tidegate.bench.goodput import Hunt, Prober
from tidegate.bench.goodput_file import GoodputFile
from tidegate.bench.goodput_plot import plot_goodput
from tidegate.bench.goodput_screen import GoodputScreen
from tidegate.bench.load import Limits
from tidegate.bench.plan import AnyWorkload, Lengths, find_workload, own_rates
from tidegate.bench.probe import Judging
from tidegate.bench.schedule import Schedule
from tidegate.bench.screen import say
from tidegate.bench.session import first_model
from tidegate.bench.sweep import Dimension, Row, combinations, measure_one, sweep
from tidegate.bench.traces import Trace
from tidegate.slo.flags import add_slo_metric
from tidegate.slo.goodput import GOODPUT_ATTAINMENT, Metric, Slo

_DEFAULT_SLO = Slo(ttft_s=0.5, tpot_s=0.05)
_INTERRUPTED = 130  # the exit code of what Ctrl-C has ended


def add_command(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    goodput = kinds.add_parser(
        "goodput",
        help="find the highest rate at which a server keeps its SLO",
        description="Find the highest rate of random arrivals at which enough of all requests attain an SLO, on any "
        "server that speaks OpenAI's API. Rates are doubled until one is too high, and then halved in between; each is "
        "held until the sample decides. With --sweep, for each setting of a running Tidegate server.",
    )
    add_server(goodput)
    goodput.add_argument("--admin-key", metavar="KEY", help="of the server's admin endpoints, for --sweep")
    load = add_workload(goodput)
    load.add_argument(
        "--own-times",
        action="store_true",
        help="a trace's own times, scaled to each rate, instead of random ones",
    )
    load.add_argument("--timeout", type=positive, default=120.0, metavar="S", help="of a request (default: 120)")
    _add_slos(goodput)
    _add_search(goodput)
    _add_sweep(goodput)
    add_files(goodput.add_argument_group("results"), "attainment against rate")
    goodput.set_defaults(measure=_run)


async def _run(arguments: argparse.Namespace) -> int:
    """Whatever ends a search, what it has found by then is shown and written."""
    started = wall_s()
    hunt = _hunt(arguments)
    all_settings = combinations(arguments.sweep)
    client, operator = Client(arguments.url, arguments.api_key), Client(arguments.url, arguments.admin_key)
    rows: list[Row] = []
    server: Any = None
    ended_by: asyncio.CancelledError | TidegateError | None = None
    with contextlib.closing(client), contextlib.closing(operator):
        model = arguments.model or await first_model(client)
        admin = Admin(operator)
        if arguments.sweep:
            server = await admin.info()
        title = f"{model} at {arguments.url}, workload {arguments.workload}"
        say(title)
        screen = GoodputScreen(hunt.judging)
        prober = Prober(client, payloads(arguments, model), hunt, screen)
        await prober.prepare()
        try:
            if arguments.sweep:
                await sweep(prober, admin, all_settings, arguments.cut_off, rows, screen)
            else:
                await measure_one(prober, rows)
        except (asyncio.CancelledError, TidegateError) as reason:  # the first is Ctrl-C
            ended_by = reason
        screen.summary(rows, complete=ended_by is None)
    if arguments.save and rows:
        results = GoodputFile.of(
            settings(arguments, model),
            hunt.judging,
            rows,
            started=started,
            server=server,
            interrupted=isinstance(ended_by, asyncio.CancelledError),
            error=str(ended_by) if isinstance(ended_by, TidegateError) else None,
        )
        arguments.save.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    if arguments.plot and any(row.probes for row in rows):
        plot_goodput(rows, hunt.judging, title, arguments.plot)
    if isinstance(ended_by, TidegateError):
        raise ended_by
    if ended_by is not None:
        return _INTERRUPTED
    return 0 if any(probe.run.failed < probe.run.requests for row in rows for probe in row.probes) else 1


def _hunt(arguments: argparse.Namespace) -> Hunt:
    workload = find_workload(arguments.workload)
    if arguments.own_times and not (isinstance(workload, Trace) and workload.timed):
        raise ConfigError("--own-times needs a workload that has times: a trace of Azure's or Mooncake's.")
    if arguments.own_times and pattern(arguments) != (1.0, None):
        raise ConfigError("--own-times are the trace's, so --burstiness and --burst can't change them.")
    if arguments.min_seconds > arguments.max_seconds:
        raise ConfigError("--min-seconds must not be more than --max-seconds.")
    period_s = _period_s(workload, pattern(arguments).period_s)
    if period_s is not None and period_s > arguments.max_seconds:
        raise ConfigError(
            f"This load repeats itself every {period_s:g} s, and a probe has to see all of it: raise --max-seconds."
        )
    if isinstance(workload, Schedule) and workload.period_s is None:
        raise ConfigError("A probe needs a load that repeats itself: give the last step of the workload its seconds.")
    judging = Judging(
        slos=_slos(arguments),
        threshold=arguments.attainment,
        confidence=arguments.confidence,
        warmup_s=arguments.warmup,
        looks_s=looks(arguments.min_seconds, arguments.max_seconds, period_s),
    )
    return Hunt(
        workload=workload,
        lengths=Lengths(arguments.prompt_tokens, arguments.output_tokens),
        pattern=pattern(arguments),
        own_times=arguments.own_times,
        judging=judging,
        limits=Limits(arguments.timeout, all_expected=arguments.ignore_eos),
        start_rate=arguments.start_rate or next(iter(own_rates(workload)), 1.0),
        highest_rate=arguments.max_rate,
        precision=arguments.precision,
        drain_s=arguments.drain,
    )


def _period_s(workload: AnyWorkload, pattern_s: float | None) -> float | None:
    """After which both the workload and the arrivals repeat themselves, to a thousandth of a second."""
    schedule_s = workload.period_s if isinstance(workload, Schedule) else None
    found = [round(period_s * 1000) for period_s in (schedule_s, pattern_s) if period_s is not None]
    return math.lcm(*found) / 1000 if found else None


def _slos(arguments: argparse.Namespace) -> list[Slo]:
    """The one that --ttft and --tpot name comes first, then those of --slo; each once."""
    if (arguments.ttft is None) != (arguments.tpot is None):
        raise ConfigError("--ttft and --tpot make an SLO together: give both, or neither.")
    given = [Slo(arguments.ttft, arguments.tpot)] if arguments.ttft is not None else []
    metric = Metric(arguments.slo_metric)
    slos = [msgspec.structs.replace(each, metric=metric) for each in given + arguments.slo] or [
        msgspec.structs.replace(_DEFAULT_SLO, metric=metric)
    ]
    return list(dict.fromkeys(slos))


# ---- arguments


def _add_slos(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("SLO")
    group.add_argument("--ttft", type=seconds, metavar="T", help="time to first token, such as 500ms (default: 500ms)")
    group.add_argument("--tpot", type=seconds, metavar="T", help="time for each next one, such as 25ms (default: 50ms)")
    group.add_argument(
        "--slo",
        type=slo,
        action="append",
        default=[],
        metavar="ttft=T,tpot=T",
        help="another SLO, whose goodput is found too; may be repeated. Each probe says how many attain each",
    )
    add_slo_metric(group)
    group.add_argument(
        "--attainment",
        type=share,
        default=GOODPUT_ATTAINMENT,
        metavar="SHARE",
        help=f"of all requests, failed ones included, that must attain the SLO (default: {GOODPUT_ATTAINMENT:g})",
    )


def _add_search(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("search")
    group.add_argument(
        "--start-rate",
        type=positive,
        metavar="R",
        help="requests per second to begin with (default: the mean of the steps' rates, else 1)",
    )
    group.add_argument(
        "--max-rate", type=positive, default=1000.0, metavar="R", help="the highest to try (default: 1000)"
    )
    group.add_argument(
        "--precision",
        type=share,
        default=0.05,
        metavar="SHARE",
        help="ends when a rate attains the SLO and one higher by this share does not (default: 0.05)",
    )
    group.add_argument(
        "--confidence",
        type=share,
        default=0.95,
        metavar="SHARE",
        help="with which each rate's attainment must lie above or below the threshold (default: 0.95)",
    )
    group.add_argument(
        "--warmup", type=positive, default=10.0, metavar="S", help="of arrivals that don't count (default: 10)"
    )
    group.add_argument(
        "--min-seconds",
        type=positive,
        default=20.0,
        metavar="S",
        help="of arrivals at least at each rate, however clear the case (default: 20)",
    )
    group.add_argument(
        "--max-seconds",
        type=positive,
        default=120.0,
        metavar="S",
        help="of arrivals at most; then the sample counts as it is, and the result says so (default: 120)",
    )
    group.add_argument(
        "--drain",
        type=positive,
        default=60.0,
        metavar="S",
        help="that the server has to become idle after each rate (default: 60)",
    )


def _add_sweep(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("sweep")
    group.add_argument(
        "--sweep",
        type=_dimension,
        action="append",
        default=[],
        metavar="NAME=V[,V...]",
        help="a setting of the running server and the values to try, such as mode=chunked,semi or "
        "shares.prefill=0.4,0.6: {FIELD: value} is posted to /admin/ENDPOINT for ENDPOINT.FIELD. May be repeated, for "
        "all combinations; the server is left at the best",
    )
    group.add_argument(
        "--cut-off",
        type=_cut_off,
        default=0.8,
        metavar="SHARE",
        help="give a combination up if it misses the first SLO at this share of the best goodput so far; 0: measure "
        "all (default: 0.8)",
    )


def _dimension(text: str) -> Dimension:
    """ "shares.prefill=0.4,0.6" as a setting and its values."""
    name, _, values = text.partition("=")
    if not re.fullmatch(r"\w+(\.\w+)?", name) or not all(values.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a setting with values such as shares.prefill=0.4,0.6")
    return Dimension(name, [_value(value) for value in values.split(",")])


def _value(text: str) -> Value:
    """A number or a truth value as JSON writes it, else a word."""
    try:
        return msgspec.json.decode(text, type=float | int | bool)
    except msgspec.MsgspecError:
        return text


def _cut_off(text: str) -> float:
    return 0.0 if text == "0" else share(text)
