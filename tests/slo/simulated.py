"""A core on a predicted device, and latency models to believe in: for tests of gates, orders and admission."""

import math
import random

from msgspec.structs import replace

from tidegate.base.events import Arrived, BatchDone, BatchEnding, Emit, Event, LaneReady, Launch
from tidegate.base.request import RequestSpec
from tidegate.core.config import CoreConfig
from tidegate.core.core import Core
from tidegate.sim.predicted import PredictedDevice
from tidegate.slo.gate import Limits, Load, Pressing
from tidegate.slo.goodput import Latency
from tidegate.slo.latency import Costs, LatencyModel, Work, rough

LEAD_S = 0.0005  # before a batch ends, its end is announced
MACHINE = rough(50_000.0)  # a batch of 256 tokens takes 5.1 ms; shares 0.25, 0.5, 0.75
LIMITS = Limits(
    max_num_batched_tokens=4096,
    max_prefill_tokens=2048,
    slice_seconds=0.03,
    min_slice_tokens=64,
    slice_quantum_tokens=16,
    prefill_tokens_per_s=50_000.0,
)


def config(**more) -> CoreConfig:
    usual = {
        "num_blocks": 20_000,
        "block_size": 16,
        "max_num_seqs": 256,
        "max_model_len": 20_000,
        "vocab_size": 10,
        "max_num_batched_tokens": LIMITS.max_num_batched_tokens,
        "max_prefill_tokens": LIMITS.max_prefill_tokens,
        "prefix_caching": False,
        "slice_seconds": LIMITS.slice_seconds,
        "min_slice_tokens": LIMITS.min_slice_tokens,
        "slice_quantum_tokens": LIMITS.slice_quantum_tokens,
        "prefill_tokens_per_s": LIMITS.prefill_tokens_per_s,
        "max_waiting": 10**6,
        "latency": MACHINE,
    }
    return CoreConfig(**usual | more)


def request(name, prompt_tokens: int, max_tokens: int = 1, **more) -> RequestSpec:
    return RequestSpec(str(name), [1] * prompt_tokens, max_tokens, **more)


class Run:
    """What became of requests: times of their tokens, their ends, and every batch that was launched."""

    def __init__(self, core: Core, truth: LatencyModel = MACHINE, noise: float = 0.0) -> None:
        self.core = core
        self.device = PredictedDevice(truth, noise)
        self.now = 0.0
        self.arrived_s: dict[str, float] = {}
        self.times_s: dict[str, list[float]] = {}
        self.outputs: dict[str, list] = {}
        self.launches: list[tuple[float, Launch]] = []
        for lane in core.mode.lanes:
            self.tell(LaneReady(lane.name))

    def tell(self, event: Event) -> None:
        if isinstance(event, Arrived):
            self.arrived_s[event.request.id] = self.now
        for action in self.core.on_event(event, self.now):
            if isinstance(action, Launch):
                self.launches.append((self.now, action))
                self.device.launch(action.lane, action.batch, self.now)
            elif isinstance(action, Emit):
                for output in action.outputs:
                    self.outputs.setdefault(output.id, []).append(output)
                    self.times_s.setdefault(output.id, []).extend([self.now] * len(output.tokens))

    def until(self, time_s: float = math.inf) -> "Run":
        """Until then, or until nothing is left to happen."""
        while True:
            warning_s, end_s = self.device.next_warning_s(LEAD_S), self.device.next_end_s()
            if min(warning_s, end_s) > time_s or math.isinf(end_s):
                break
            self.now = max(self.now, min(warning_s, end_s))
            if warning_s <= end_s:
                self.tell(BatchEnding(*self.device.warn(self.now, LEAD_S)))
            else:
                self.tell(BatchDone(*self.device.end(self.now)))
        if math.isfinite(time_s):
            self.now = time_s
        return self

    def arrive(self, time_s: float, spec: RequestSpec) -> None:
        self.until(time_s).tell(Arrived(spec))

    @property
    def latencies(self) -> dict[str, Latency]:
        return {name: Latency.of(self.arrived_s[name], times) for name, times in self.times_s.items() if times}


def conversations(run: Run, rate: float, seconds: float, seed: int = 1) -> Run:
    """Requests of log-normal lengths (medians 400 and 40 tokens) as a Poisson process, served to the end."""
    rng, time_s, count = random.Random(seed), 0.0, 0
    while (time_s := time_s + rng.expovariate(rate)) < seconds:
        prompt, output = rng.lognormvariate(6.0, 0.8), rng.lognormvariate(3.7, 0.6)
        run.arrive(time_s, request(count, max(8, min(4000, int(prompt))), max(2, min(200, int(output)))))
        count += 1
    return run.until()


def slower(model: LatencyModel, factor: float) -> LatencyModel:
    """A device on which everything takes ``factor`` times as long."""

    def costs(of: Costs) -> Costs:
        seconds = {name: getattr(of, name) * factor for name in ("pair_s", "reused_s", "context_s")}
        return replace(of, dense_s=tuple(dense * factor for dense in of.dense_s), **seconds)

    divisions = (replace(d, prefill=costs(d.prefill), decode=costs(d.decode)) for d in model.divisions)
    return LatencyModel(costs(model.whole), tuple(divisions))


def load(lane="D", rows=32, context=1000, prompts=(), spares_s=(), busy=False, ready=False, now=0.0, late=0) -> Load:
    """``rows`` decoding requests of ``context`` tokens each; ``prompts`` of (tokens left, seconds to the deadline)."""
    pressing = [Pressing(0, tokens, now + left_s) for tokens, left_s in prompts]
    work = Work(rows=rows, context=rows * context)
    return Load(now, lane, work, pressing, list(spares_s), busy, ready, late)
