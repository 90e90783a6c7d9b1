"""What prefill does to those who are decoding, mode by mode, through one engine that changes its mode while serving.

    python benchmarks/cpu_gaps.py [--quantization int8] [--plot docs/gaps.png] [--seconds 20]

Eight requests decode; from the fifth second on, prompts of 1,500 tokens come one after another, each as soon as the one
before has its first token. Printed for each mode: gaps between tokens of the eight, and the rate of prefill.
"""

import argparse
import asyncio
import itertools
import time
from typing import NamedTuple

from tidegate.base.request import RequestSpec
from tidegate.models.demo import demo_model_path
from tidegate.node.client import EngineProcess, start_engine
from tidegate.node.config import EngineConfig
from tidegate.slo.goodput import percentile

SHOWN = ("prefill-first", "chunked", "semi")  # pod is chunked without a GPU, and auto needs an SLO
DECODING, PROMPT_TOKENS, QUIET_SECONDS = 8, 1500, 5.0
ids = itertools.count()


class Outcome(NamedTuple):
    gaps: list[tuple[float, float]]  # (seconds since the start, gap in milliseconds)
    prompts_per_s: float


def request(length: int, max_tokens: int) -> RequestSpec:
    number = next(ids)
    return RequestSpec(f"r{number}", [(number * 7919 + 31 * i) % 40000 + 10 for i in range(length)], max_tokens)


async def run_mode(engine: EngineProcess, mode: str, seconds: float) -> Outcome:
    await engine.set_mode(mode)
    start = time.perf_counter()
    gaps: list[tuple[float, float]] = []
    running: list[str] = []

    async def decode() -> None:
        spec = request(24, 4000)
        running.append(spec.id)
        last = None
        async for _ in engine.submit(spec):
            now = time.perf_counter()
            if last is not None:
                gaps.append((now - start, (now - last) * 1e3))
            last = now

    decoders = [asyncio.create_task(decode()) for _ in range(DECODING)]
    await asyncio.sleep(QUIET_SECONDS)
    prompts, first = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - first) < seconds:
        async for _ in engine.submit(request(PROMPT_TOKENS, 1)):
            pass
        prompts += 1
    elapsed = time.perf_counter() - first
    for request_id in running:
        engine.abort(request_id)
    await asyncio.gather(*decoders)
    return Outcome(gaps, prompts / elapsed)


async def prefill_alone(engine: EngineProcess) -> float:
    """Prompts a second on the whole machine, nothing decoding."""
    start = 0.0
    for i in range(6):
        if i == 2:  # the first ones teach the engine how long its slices may be
            start = time.perf_counter()
        async for _ in engine.submit(request(PROMPT_TOKENS, 1)):
            pass
    return 4 / (time.perf_counter() - start)


def plot(outcomes: dict[str, Outcome], file: str) -> None:
    import matplotlib

    matplotlib.use("svg" if file.endswith(".svg") else "agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(outcomes), 1, sharex=True, sharey=True, figsize=(8, 1.7 * len(outcomes) + 0.8))
    for axis, (mode, outcome) in zip(axes, outcomes.items(), strict=True):
        axis.axvspan(QUIET_SECONDS, max(at for at, _ in outcome.gaps), color="#d9822b", alpha=0.12, lw=0)
        axis.plot(*zip(*outcome.gaps, strict=True), ".", color="#2b7a9b", ms=2.5)
        axis.set_yscale("log")
        axis.set_ylim(4, 2500)
        axis.set_ylabel("gap, ms")
        axis.set_title(f"{mode}: {outcome.prompts_per_s * PROMPT_TOKENS:.0f} prompt tokens/s beside", fontsize=10)
        axis.grid(axis="y", alpha=0.3)
    axes[-1].set_xlabel("seconds; shaded: long prompts are coming in")
    figure.tight_layout()
    figure.savefig(file, dpi=130)


async def measure(arguments: argparse.Namespace) -> None:
    config = EngineConfig(
        model=str(demo_model_path()),
        quantization=arguments.quantization,
        max_model_len=4096,
        prefix_caching=False,
    )
    engine = await start_engine(config)
    alone = await prefill_alone(engine)
    print(f"prefill alone, whole machine: {alone * PROMPT_TOKENS:.0f} tokens/s")
    names = ("quiet p50", "busy p50", "p99", "max", "prefill tokens/s", "% of whole")
    print(f"{'mode':<14}" + "".join(f"{name:>{len(name) + 3}}" for name in names))
    outcomes = {}
    for mode in SHOWN:
        outcome = outcomes[mode] = await run_mode(engine, mode, arguments.seconds)
        quiet = [gap for at, gap in outcome.gaps if 1.0 < at < QUIET_SECONDS]
        busy = [gap for at, gap in outcome.gaps if at > QUIET_SECONDS]
        row = [percentile(quiet, 0.5), percentile(busy, 0.5), percentile(busy, 0.99), max(busy)]
        row += [outcome.prompts_per_s * PROMPT_TOKENS, 100 * outcome.prompts_per_s / alone]
        values = zip(names, row, strict=True)
        print(f"{mode:<14}" + "".join(f"{value:>{len(name) + 3}.0f}" for name, value in values))
    await engine.close()
    if arguments.plot:
        plot(outcomes, arguments.plot)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantization", choices=["int8"])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--plot", metavar="FILE")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
