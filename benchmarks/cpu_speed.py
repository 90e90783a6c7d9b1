"""How fast one engine is on this CPU: decode at several batch sizes, prefill, and both mixed.

    python benchmarks/cpu_speed.py [--quantization int8] [--mode semi] [--model PATH] [--repeat 3]

Prints a row of a Markdown table; the best of the repetitions of each figure, because whatever else runs on a machine
only makes it slower. Prompts are random token ids, so nothing is found in the prefix cache; output is greedy.
"""

import argparse
import asyncio
import random
import statistics
from dataclasses import dataclass

from tidegate.base.clock import now_s
from tidegate.base.request import RequestSpec, SamplingParams
from tidegate.models.demo import demo_model_path
from tidegate.node.client import EngineProcess, start_engine
from tidegate.node.config import EngineConfig

COLUMNS = ("weights", "mode", "batch 1", "batch 8", "batch 16", "prefill", "mixed", "TTFT p50 s", "ready s")


@dataclass
class Finished:
    started_s: float
    first_s: float
    ended_s: float
    tokens: int


class Load:
    """Requests with random prompts against one engine."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine
        self._random = random.Random(0)
        self._count = 0

    async def one(self, prompt_tokens: int, output_tokens: int) -> Finished:
        self._count += 1
        vocabulary = self._engine.info.model.vocab_size
        prompt = [self._random.randrange(vocabulary) for _ in range(prompt_tokens)]
        sampling = SamplingParams(temperature=0.0)
        started, first, tokens = now_s(), 0.0, 0
        async for output in self._engine.submit(RequestSpec(str(self._count), prompt, output_tokens, sampling)):
            first = first or now_s()
            tokens += len(output.tokens)
        return Finished(started, first, now_s(), tokens)

    async def decode(self, batch: int) -> float:
        """Tokens a second that ``batch`` requests decode together, from the first token of all to the last."""
        done = await asyncio.gather(*(self.one(24, 64) for _ in range(batch)))
        span = max(f.ended_s for f in done) - min(f.first_s for f in done)
        return sum(f.tokens - 1 for f in done) / span

    async def prefill(self) -> float:
        """Prompt tokens a second of two prompts."""
        start = now_s()
        await asyncio.gather(self.one(800, 1), self.one(800, 1))
        return 1600 / (now_s() - start)

    async def mixed(self) -> tuple[float, float]:
        """16 requests, 8 at a time, 200 in and 48 out: output tokens a second, and the median TTFT in seconds."""
        gate = asyncio.Semaphore(8)

        async def gated() -> Finished:
            async with gate:
                return await self.one(200, 48)

        start = now_s()
        done = await asyncio.gather(*(gated() for _ in range(16)))
        return sum(f.tokens for f in done) / (now_s() - start), statistics.median(f.first_s - f.started_s for f in done)


async def measure(config: EngineConfig, repeat: int) -> list[str]:
    start = now_s()
    engine = await start_engine(config)
    ready = now_s() - start
    try:
        load = Load(engine)
        await load.mixed()  # every batch size has been seen once
        decode = [max([await load.decode(batch) for _ in range(repeat)]) for batch in (1, 8, 16)]
        prefill = max([await load.prefill() for _ in range(repeat)])
        mixed = max([await load.mixed() for _ in range(repeat)])
    finally:
        await engine.close()
    rates = [f"{rate:.0f}" for rate in (*decode, prefill, mixed[0])]
    return [config.quantization or "float32", config.mode, *rates, f"{mixed[1]:.2f}", f"{ready:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="(default: SmolLM2-135M-Instruct)")
    parser.add_argument("--quantization", choices=("int8",))
    parser.add_argument("--mode", default="semi")
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    model = arguments.model or str(demo_model_path())
    config = EngineConfig(model=model, mode=arguments.mode, quantization=arguments.quantization)
    row = asyncio.run(measure(config, arguments.repeat))
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + "---|" * len(COLUMNS))
    print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
