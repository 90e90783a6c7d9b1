"""``tidegate simulate``: the core, its rules and its gate on a virtual clock, over a latency model of a device.

It is in this package, and not in ``sim``, since it reads workloads as ``tidegate bench`` does.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from tidegate.base.errors import ConfigError
from tidegate.bench.arguments import pattern
from tidegate.bench.arguments import settings as all_settings
from tidegate.bench.plan import Amount, Lengths, arrivals, find_workload, own_rates, replayed_requests
from tidegate.bench.screen import say
from tidegate.bench.search import Search
from tidegate.bench.simulate_arguments import add_arguments
from tidegate.bench.simulate_text import outcome_text, sweep_text
from tidegate.bench.traces import Trace
from tidegate.bench.workloads import Request
from tidegate.core.config import CoreConfig
from tidegate.policy.modes import MODES
from tidegate.sim.engine import Host, SimulatedEngine
from tidegate.sim.fleet import serve
from tidegate.sim.outcome import Outcome, outcome
from tidegate.slo.goodput import GOODPUT_ATTAINMENT, Metric, Slo
from tidegate.slo.latency import LatencyModel, rough
from tidegate.slo.latency_file import read_latency_model
from tidegate.slo.parse import parse_slo

ROUGH = "rough:"
ENDLESS = 1 << 30  # requests may wait
FARTHEST = 256.0
NEAR_STEP = 1.1  # from where a search begins


class Setting(msgspec.Struct, frozen=True):
    """What a sweep varies. ``prefill_share``: None where the mode, or its gate, sets it. ``rate``: None for a trace's
    own times."""

    mode: str
    max_num_batched_tokens: int
    prefill_share: float | None
    rate: float | None


class Result(msgspec.Struct, frozen=True):
    """``goodput``: requests per second, where it was asked for; ``outcome`` is then at that rate."""

    setting: Setting
    outcome: Outcome
    goodput: float | None = None


class Answer(msgspec.Struct, frozen=True):
    """What --json prints."""

    slo: Slo
    settings: dict[str, Any]
    results: list[Result]


class Models(NamedTuple):
    truth: LatencyModel
    belief: LatencyModel


def add_simulate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command ``simulate``."""
    about = "predict latencies and goodput of this server's scheduling on a device that was measured"
    command = commands.add_parser("simulate", help=about, description=f"{about[0].upper()}{about[1:]}.")
    add_arguments(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The exit code. Raises ConfigError."""
    slo, results = _slo(arguments), simulated(arguments)
    if arguments.json:
        answer = Answer(slo, all_settings(arguments, arguments.truth), results)
        say(msgspec.json.format(msgspec.json.encode(answer), indent=1).decode())
    elif arguments.sweep:
        say(sweep_text([(_title(r.setting), r.outcome, r.goodput) for r in results], slo))
    else:
        say(outcome_text(_title(results[0].setting), results[0].outcome, slo, results[0].goodput))
    return 0


def simulated(arguments: argparse.Namespace) -> list[Result]:
    """Of every setting that the command line asks for. Raises ConfigError."""
    truth = load_model(arguments.truth)
    models = Models(truth, load_model(arguments.belief) if arguments.belief else truth)
    settings = list(_combinations(arguments))
    if len(settings) > 1 and not arguments.sweep:
        raise ConfigError("Lists of modes, chunks, shares or rates need --sweep.")
    return [_simulate(arguments, setting, _slo(arguments), models) for setting in settings]


def _slo(arguments: argparse.Namespace) -> Slo:
    return parse_slo(arguments.slo, Metric(arguments.slo_metric))


def load_model(place: str) -> LatencyModel:
    """A latency model's JSON file, or "rough:N": N prompt tokens per second, and no more known."""
    if not place.startswith(ROUGH):
        return read_latency_model(place)
    try:
        return rough(float(place.removeprefix(ROUGH)))
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"{place} can't be read as a latency model: {error}") from None


def _combinations(arguments: argparse.Namespace) -> Iterator[Setting]:
    """Every combination; shares only where a mode lets the user set them."""
    rates = arguments.rate or own_rates(find_workload(arguments.workload)) or [None]
    for mode in arguments.mode:
        divides = len(MODES[mode].lanes) > 1 and (arguments.gate or MODES[mode].gates[0]) == "static"
        shares = arguments.prefill_share if divides else [None]
        for chunk, share, rate in itertools.product(arguments.max_num_batched_tokens, shares, rates):
            yield Setting(mode, chunk, share, rate)


def _simulate(arguments: argparse.Namespace, setting: Setting, slo: Slo, models: Models) -> Result:
    if not arguments.goodput:
        return Result(setting, _outcome(arguments, setting, slo, models))
    if setting.rate is None:
        raise ConfigError("--goodput needs a rate to start from: --rate.")
    outcomes: dict[float, Outcome] = {}

    def attained(rate: float) -> float:
        outcomes[rate] = _outcome(arguments, msgspec.structs.replace(setting, rate=rate), slo, models)
        return outcomes[rate].attainment

    goodput = search_goodput(attained, setting.rate)
    rate = goodput or min(outcomes)
    return Result(msgspec.structs.replace(setting, rate=rate), outcomes[rate], goodput)


def search_goodput(attained: Callable[[float], float], start: float) -> float:
    """The highest rate found, to 1 %, at which ``attained(rate)`` is 90 % or more; 0 for none. The search goes from
    ``start`` as far as ``FARTHEST`` times as much, or as little."""
    search = Search(start, precision=0.01, lowest=start / FARTHEST, highest=start * FARTHEST, step=NEAR_STEP)
    while (rate := search.next_rate()) is not None:
        search.learn(rate, attained(rate) >= GOODPUT_ATTAINMENT)
    return search.low


def _outcome(arguments: argparse.Namespace, setting: Setting, slo: Slo, models: Models) -> Outcome:
    requests = _requests(arguments, setting.rate)
    config = _config(arguments, setting, slo, models.belief, requests)
    host = Host(arguments.launch_ms / 1e3, arguments.lead_ms / 1e3, arguments.deliver_ms / 1e3)
    engines = [
        SimulatedEngine(config, models.truth, host, arguments.noise, arguments.seed + index, factors=arguments.factors)
        for index in range(arguments.engines)
    ]
    serve(requests, engines, arguments.router)
    return outcome(engines, slo)


def _requests(arguments: argparse.Namespace, rate: float | None) -> Sequence[Request]:
    workload = find_workload(arguments.workload)
    amount = Amount(arguments.num_requests, arguments.seconds)
    if rate is not None:
        coming = arrivals(workload, rate, arguments.seed, pattern(arguments))
        requests = list(itertools.islice(coming, amount.covering(workload).at(rate)))
    elif isinstance(workload, Trace) and workload.timed:
        requests = replayed_requests(workload, arguments.speedup, amount)
    else:
        raise ConfigError("The workload has no times of its own: give --rate.")
    requests = list(Lengths(arguments.prompt_tokens, arguments.output_tokens).applied(requests))
    if not requests:
        raise ConfigError("There are no requests in that time.")
    return requests


def _config(
    arguments: argparse.Namespace, setting: Setting, slo: Slo, belief: LatencyModel, requests: Sequence[Request]
) -> CoreConfig:
    longest = max(request.prompt_tokens + request.output_tokens for request in requests)
    share = 0.5 if setting.prefill_share is None else setting.prefill_share
    prefill_tokens = min(setting.max_num_batched_tokens, arguments.max_prefill_tokens)
    return CoreConfig(
        num_blocks=arguments.num_gpu_blocks_override,
        block_size=arguments.block_size,
        max_num_seqs=arguments.max_num_seqs,
        max_model_len=longest if arguments.max_model_len is None else arguments.max_model_len,
        vocab_size=0,
        max_num_batched_tokens=setting.max_num_batched_tokens,
        max_prefill_tokens=arguments.max_prefill_tokens,
        mode=setting.mode,
        shares={"P": share, "D": 1.0 - share},
        order=arguments.order or "slack",
        prefix_caching=False,
        max_waiting=ENDLESS if arguments.max_waiting is None else arguments.max_waiting,
        gate=arguments.gate,
        slo=slo,
        latency=belief,
        slice_seconds=arguments.slice_ms / 1e3,
        min_slice_tokens=arguments.min_slice_tokens,
        slice_quantum_tokens=arguments.slice_quantum_tokens,
        max_slices=arguments.max_slices,
        padding=belief.whole.padding,
        prefill_tokens_per_s=prefill_tokens / belief.whole.dense(prefill_tokens),
    )


def _title(setting: Setting) -> str:
    share = "" if setting.prefill_share is None else f", prefill {setting.prefill_share:.0%}"
    rate = "" if setting.rate is None else f", {setting.rate:.4g} requests/s"
    return f"{setting.mode}, {setting.max_num_batched_tokens} tokens{share}{rate}"
