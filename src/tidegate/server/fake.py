"""An engine without a model, for tests and measurements of what is in front of an engine.

It follows the same protocol and promises as the real one (exactly one terminal output a request, stop ids, limits),
in this process, one step after another.
"""

import asyncio
import copy
import itertools
from collections.abc import Callable, Sequence

import msgspec

from tidegate.base.errors import EngineDead, RequestError
from tidegate.base.events import Tuned
from tidegate.base.request import Output, RequestSpec, TokenLogprob
from tidegate.base.specs import ModelSpec, PoolSpec
from tidegate.base.stats import LaneStats, Stats
from tidegate.node.engine import OutputStream
from tidegate.node.wire import EngineInfo


class Script(msgspec.Struct):
    """How a request goes: silent for ``wait_steps``, then ``tokens_per_step`` tokens a step, then ``finish``.

    ``tokens`` are repeated up to the request's limit; a stop id among them ends it before. ``finish`` other than
    "length" ends it after ``fail_after`` tokens, with ``reason`` and ``retry_after_s``.
    """

    tokens: Sequence[int]
    wait_steps: int = 0
    tokens_per_step: int = 1
    finish: str = "length"
    fail_after: int = 0
    reason: str = ""
    retry_after_s: float | None = None
    cached_tokens: int = 0


def repeat_prompt(request: RequestSpec) -> Script:
    """The default: a model that says its prompt again and again."""
    return Script(request.prompt)


def fake_info(vocab_size: int = 49152, max_model_len: int = 8192, eos_ids: tuple[int, ...] = ()) -> EngineInfo:
    model = ModelSpec("FakeForCausalLM", 1, 8, 1, 1, 8, 8, vocab_size, max_model_len, eos_ids=eos_ids)
    pool = PoolSpec(num_blocks=1024, block_size=16, max_num_seqs=256, max_model_len=max_model_len)
    return EngineInfo(model, pool, "semi", ["chunked", "semi"], max_model_len, 0, 0, "none", "none", 0.0, lane_pids={})


class FakeEngine:
    """``script(request)`` says how each request goes; a step takes ``step_s`` seconds.

    ``submitted``, ``aborted``, ``tuned`` and ``times_asked`` (for statistics) record the calls; ``statistics`` is what
    ``stats`` answers, for tests to set.
    """

    def __init__(
        self,
        script: Callable[[RequestSpec], Script] = repeat_prompt,
        *,
        info: EngineInfo | None = None,
        step_s: float = 0.0,
    ) -> None:
        self.info = info or fake_info()
        self.alive = True
        self.submitted: list[RequestSpec] = []
        self.aborted: list[str] = []
        self.times_asked = 0
        self.tuned: list[Tuned] = []
        self._script = script
        self._step_s = step_s
        self._running: dict[str, _Running] = {}
        self._stepping: asyncio.Task[None] | None = None
        self.statistics = Stats(
            mode=self.info.mode,
            blocks_total=self.info.pool.num_blocks,
            blocks_free=self.info.pool.num_blocks,
            lanes={
                "P": LaneStats(alive=True, phases="P", share=0.5),
                "D": LaneStats(alive=True, phases="D", share=0.5),
            },
        )

    def submit(self, request: RequestSpec) -> OutputStream:
        self._check_alive()
        self.submitted.append(request)
        stream = OutputStream(request.id)
        self._running[request.id] = _Running(request, self._script(request), stream)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.get_running_loop().create_task(self._steps())
        return stream

    def abort(self, request_id: str) -> None:
        self._check_alive()
        self.aborted.append(request_id)
        running = self._running.pop(request_id, None)
        if running is not None:
            self._count("abort")
            running.stream.put(Output(request_id, [], "abort"))

    async def stats(self) -> Stats:
        self._check_alive()
        self.statistics.decoding = len(self._running)
        self.times_asked += 1
        return copy.deepcopy(self.statistics)

    async def set_mode(self, mode: str) -> Stats:
        if mode not in self.info.modes:
            raise RequestError(f"There is no mode {mode!r} here; there are {', '.join(self.info.modes)}.")
        self.statistics.mode = mode
        return await self.stats()

    async def set_shares(self, shares: dict[str, float]) -> Stats:
        if shares.keys() != self.statistics.lanes.keys():
            raise RequestError(f"Shares are for the lanes {', '.join(self.statistics.lanes)}.")
        for lane, share in shares.items():
            self.statistics.lanes[lane].share = share
        return await self.stats()

    async def tune(self, settings: Tuned) -> Stats:
        self.tuned.append(settings)
        return await self.stats()

    async def reset_prefix_cache(self) -> Stats:
        self.statistics.blocks_cached = 0
        return await self.stats()

    async def close(self) -> None:
        for request_id in list(self._running):
            self.abort(request_id)
        self.alive = False

    def die(self, reason: str = "it was told to") -> None:
        """As if the engine's process ended: all streams break, and so does every call from now on."""
        self.alive = False
        for running in self._running.values():
            running.stream.put(EngineDead(reason))
        self._running.clear()

    def _check_alive(self) -> None:
        if not self.alive:
            raise EngineDead("it is not running")

    def _count(self, finish: str) -> None:
        self.statistics.finished[finish] = self.statistics.finished.get(finish, 0) + 1

    async def _steps(self) -> None:
        while self._running:
            for running in list(self._running.values()):
                output = running.step()
                if output is None:
                    continue
                if output.finish is not None:
                    self._count(output.finish)
                    del self._running[output.id]
                running.stream.put(output)
            await asyncio.sleep(self._step_s)


class _Running:
    def __init__(self, request: RequestSpec, script: Script, stream: OutputStream) -> None:
        self.stream = stream
        self._request = request
        self._script = script
        self._waited = 0
        self._said = 0
        self._tokens = itertools.cycle(script.tokens)

    def step(self) -> Output | None:
        """The output of one step, or None while waiting."""
        script, request = self._script, self._request
        if self._waited < script.wait_steps:
            self._waited += 1
            return None
        if script.finish != "length" and self._said >= script.fail_after:
            return Output(request.id, [], script.finish, script.reason, retry_after_s=script.retry_after_s)
        output = Output(request.id, [], cached_tokens=0 if self._said else script.cached_tokens)
        while len(output.tokens) < script.tokens_per_step and output.finish is None:
            output.tokens.append(next(self._tokens))
            self._said += 1
            if output.tokens[-1] in request.sampling.stop_token_ids and self._said > request.sampling.min_tokens:
                output.finish = "stop"
            elif self._said == request.max_tokens:
                output.finish = "length"
        if request.sampling.logprobs is not None:
            output.logprobs = [self._logprob(token, request.sampling.logprobs) for token in output.tokens]
        return output

    def _logprob(self, token: int, best: int) -> TokenLogprob:
        ids = [(token + i) % 256 for i in range(best)]
        return TokenLogprob(-0.25, 1, ids, [-0.25 - i for i in range(best)])
