"""Drives a real engine (processes and all) from a plain test, and knows what transformers would have answered."""

import asyncio
import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tidegate.base.errors import EngineDead
from tidegate.base.request import Output, RequestSpec, SamplingParams
from tidegate.node.client import EngineProcess, start_engine
from tidegate.node.config import EngineConfig
from tidegate.policy.modes import MODES
from tidegate.slo.goodput import Slo

SLO = Slo(0.5, 0.05)  # for modes that need one to hold
MARGIN = 1e-4  # where the reference's two best logits are closer, either token is right


@dataclass
class Answer:
    tokens: list[int]
    finish: str
    outputs: list[Output]


class EngineDriver:
    """An engine and the loop that it is used from. ``with EngineDriver(config) as engine: ...``"""

    _ids = itertools.count()

    def __init__(self, config: EngineConfig) -> None:
        self._runner = asyncio.Runner()
        self.received = 0  # outputs so far
        self._doomed: tuple[str, int] | None = None  # a lane to kill, and at which output
        self._kills: Counter[str] = Counter()
        self.engine: EngineProcess = self._runner.run(start_engine(config))

    def __enter__(self) -> "EngineDriver":
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self.engine.close())
        self._runner.close()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(work)

    def stats(self):
        return self.run(self.engine.stats())

    def spec(self, prompt: Sequence[int], max_tokens: int, **sampling: Any) -> RequestSpec:
        return RequestSpec(f"t{next(self._ids)}", list(prompt), max_tokens, SamplingParams(**sampling))

    async def answer(self, spec: RequestSpec) -> Answer:
        outputs = []
        async for output in self.engine.submit(spec):
            outputs.append(output)
            self._output()
        ends = [output.finish for output in outputs if output.finish is not None]
        assert len(ends) == 1, "exactly one terminal output"
        return Answer([token for output in outputs for token in output.tokens], ends[0], outputs)

    async def kill_lane(self, lane: str, after_outputs: int) -> None:
        """Kills a lane's process at the output that is so many further on; for ``meanwhile``."""
        self._doomed = lane, self.received + after_outputs

    def _output(self) -> None:
        self.received += 1
        if self._doomed is not None and self.received >= self._doomed[1]:
            lane, self._doomed = self._doomed[0], None
            os.kill(self.engine.info.lane_pids[lane], signal.SIGKILL)
            self._kills[lane] += 1

    async def _lanes_back(self) -> None:
        """Waits until every lane that was killed has been started again."""
        for lane, kills in self._kills.items():
            while (await self.engine.stats()).lanes[lane].restarts < kills:
                await asyncio.sleep(0.01)

    def answers(
        self,
        specs: Sequence[RequestSpec],
        meanwhile: Coroutine[Any, Any, None] | None = None,
    ) -> list[Answer]:
        """All at once; ``meanwhile`` runs beside them until they have ended."""

        async def work() -> list[Answer]:
            side = asyncio.create_task(meanwhile) if meanwhile else None
            try:
                answers = await asyncio.gather(*(self.answer(spec) for spec in specs))
                await asyncio.wait_for(self._lanes_back(), 30)
                return answers
            finally:
                if side is not None:
                    if side.done():
                        side.result()
                    side.cancel()

        return self.run(work())

    def differing_from_alone(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[int, int]:
        """Answers whose greedy tokens are not what a request gets alone, of how many: in a crowd in every mode, and in
        ``semi`` while the decode lane is killed."""

        def specs() -> list[RequestSpec]:
            return [self.spec(prompt, max_tokens) for prompt in prompts]

        alone = [self.answers([spec])[0].tokens for spec in specs()]
        crowds = []
        for mode in MODES:
            self.run(self.engine.set_mode(mode))
            crowds.append(self.answers(specs()))
        self.run(self.engine.set_mode("semi"))
        crowds.append(self.answers(specs(), meanwhile=self.kill_lane("D", after_outputs=20)))
        differing = sum(a.tokens != tokens for crowd in crowds for a, tokens in zip(crowd, alone, strict=True))
        return differing, len(crowds) * len(prompts)

    async def ends_with_a_lost_rank(self, rank_pid: int, spec: RequestSpec) -> None:
        """Kills rank 1 of 2 while a request runs: the request ends with the reason, the engine ends and names it."""
        stream = self.engine.submit(spec)
        await anext(stream)
        os.kill(rank_pid, signal.SIGKILL)
        outputs = [output async for output in stream]
        assert outputs[-1].finish == "error" and "rank 1 of 2 was lost" in outputs[-1].reason
        await asyncio.to_thread(self.engine.process.wait)
        with pytest.raises(EngineDead, match=r"rank 1 of 2 was lost"):
            while True:  # until what the process said last has been read
                await asyncio.sleep(0.01)
                await self.engine.stats()


@dataclass
class Reference:
    """What transformers generates greedily, and how sure it was of each token."""

    prompt: list[int]
    tokens: list[int]
    margins: list[float]

    def check(self, tokens: list[int], what: str = "") -> int:
        """Asserts equality up to the first tie; returns 1 if a tie was met."""
        assert len(tokens) == len(self.tokens), what
        for i, (ours, theirs, margin) in enumerate(zip(tokens, self.tokens, self.margins, strict=True)):
            if margin < MARGIN:
                return 1
            assert ours == theirs, f"{what}: token {i} of a prompt of {len(self.prompt)} (margin {margin:.2g})"
        return 0


@torch.inference_mode()
def reference(model: Any, prompt: list[int], max_tokens: int) -> Reference:
    tokens, margins, past = [], [], None
    fed = torch.tensor([prompt])
    for _ in range(max_tokens):
        out = model(fed, past_key_values=past, use_cache=True)
        past = out.past_key_values
        best = out.logits[0, -1].float().topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        fed = best.indices[:1].view(1, 1)
    return Reference(prompt, tokens, margins)


def mixed_prompts(count: int, longest: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """Lengths from 1 to ``longest``, short ones more often; half of them begin alike."""
    rng = random.Random(seed)
    lengths = [1, 2, 15, 16, 17, 32, 33, longest]
    lengths += [int(longest ** rng.random()) for _ in range(count - len(lengths))]
    common = [rng.randrange(vocab) for _ in range(longest)]
    prompts = []
    for i, length in enumerate(lengths[:count]):
        own = [rng.randrange(vocab) for _ in range(length)]
        shared = length * 2 // 3 if i % 2 else 0
        prompts.append(common[:shared] + own[shared:])
    rng.shuffle(prompts)
    return prompts
