"""One engine on a virtual clock: the core that serves, its rules and its gate, on a device that predicts."""

import math
from array import array
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from tidegate.base.events import Arrived, BatchDone, BatchEnding, Emit, Event, LaneReady, Launch
from tidegate.base.request import Output, RequestSpec
from tidegate.core.config import CoreConfig
from tidegate.core.core import Core
from tidegate.core.steady import TOKEN, SteadyRun
from tidegate.sim.predicted import AS_MEASURED, BESIDE, Job, PredictedDevice
from tidegate.sim.served import Records, Served
from tidegate.slo.goodput import Latency
from tidegate.slo.latency import LatencyModel


class Asked(Protocol):
    """A request of a workload: how long its prompt is, and how long its answer will be."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def output_tokens(self) -> int: ...


class Host(NamedTuple):
    """What the host's work adds, in seconds. The defaults are those of one H200's host."""

    launch_s: float = 0.0008  # from a launch to the start of its batch, where the lane was idle
    lead_s: float = 0.0016  # before its end, a batch is announced to end (BatchEnding); 0: it is not
    deliver_s: float = 0.0015  # from a token to its client


class Readings(NamedTuple):
    """Of an engine from time 0 to its last event."""

    seconds: float
    busy_s: dict[str, float]  # by lane
    spent_s: dict[str, float]  # by what ran: a kind of batch alone, or two lanes side by side

    @property
    def beside_s(self) -> float:
        """While two lanes ran."""
        return self.spent_s.get(BESIDE, 0.0)


class _Answer:
    __slots__ = ("arrived_s", "prompt_tokens", "times_s")

    def __init__(self, arrived_s: float, prompt_tokens: int) -> None:
        self.arrived_s = arrived_s
        self.prompt_tokens = prompt_tokens
        self.times_s = array("d")  # of its tokens


class SimulatedEngine:
    """Requests go in with ``submit``, at times that never descend; ``advance`` lets time pass.

    Equal arguments and equal requests give equal results. Prompts are taken to share nothing, so ``config`` should not
    have prefix caching. Memory: running requests with their tokens' times, and ``Records``.
    """

    def __init__(
        self,
        config: CoreConfig,
        truth: LatencyModel,
        host: Host = Host(),  # noqa: B008
        noise: float = 0.0,
        seed: int = 0,
        one_by_one: bool = False,
        factors: Mapping[str, float] = AS_MEASURED,
    ) -> None:
        """``truth``: how long batches take, each times exp(N(0, noise)) and the factor of its kind
        (``slo.accuracy.KINDS``); what the gate believes is ``config.latency``. ``one_by_one``: take each step of a
        steady run through the core, with the same results."""
        self._core = Core(config)
        self.device = PredictedDevice(truth, noise, seed, host.launch_s, factors)
        self.records = Records()
        self.now = 0.0
        self._host = host
        self._one_by_one = one_by_one
        self._answers: dict[str, _Answer] = {}
        self._submitted = 0
        self._prompt: list[int] = []  # as long as the longest so far
        self._run: SteadyRun | None = None
        self._run_times = array("d")  # of the tokens that everybody got in it
        for lane in self._core.mode.lanes:
            self.tell(LaneReady(lane.name), 0.0)

    @property
    def core(self) -> Core:
        self._close()
        return self._core

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return len(self._answers)

    @property
    def readings(self) -> Readings:
        return Readings(self.now, dict(self.device.busy_s), dict(self.device.spent_s))

    def submit(self, asked: Asked, now: float) -> None:
        self.advance(now)
        if len(self._prompt) < asked.prompt_tokens:
            self._prompt = [TOKEN] * asked.prompt_tokens
        spec = RequestSpec(str(self._submitted), self._prompt[: asked.prompt_tokens], asked.output_tokens)
        self._submitted += 1
        self._answers[spec.id] = _Answer(now, asked.prompt_tokens)
        self.tell(Arrived(spec), now)

    def tell(self, event: Event, now: float) -> None:
        """An event that the device does not cause."""
        self.advance(now)
        self._close()
        self._happens(event, max(now, self.now))

    def next_s(self) -> float:
        """When something happens next by itself; infinity when all is done."""
        return min(self.device.next_end_s(), self._next_warning_s())

    def advance(self, until: float = math.inf) -> None:
        """Lets everything happen that happens before ``until``."""
        while True:
            end_s, warning_s = self.device.next_end_s(), self._next_warning_s()
            if end_s >= until and warning_s >= until:
                break
            if warning_s <= end_s:
                self._warned(max(self.now, warning_s))
            else:
                self._ended(max(self.now, end_s))

    def _next_warning_s(self) -> float:
        return self.device.next_warning_s(self._host.lead_s) if self._host.lead_s > 0 else math.inf

    def _warned(self, now: float) -> None:
        lane, batch_id = self.device.warn(now, self._host.lead_s)
        if self._run is None:
            self._happens(BatchEnding(lane, batch_id), now)
        else:
            self.now = now
            self._bind(self._run)

    def _ended(self, now: float) -> None:
        lane, result = self.device.end(now)
        run = self._run
        if run is not None and self._host.lead_s <= 0 and not run.goes_on:
            self._close()
            run = None
        if run is None:
            self._happens(BatchDone(lane, result), now)
            if not self._one_by_one:
                self._run = self._core.steady(lane)
            return
        self.now = now
        self._run_times.append(now)
        for request in run.land(result.id, result.seconds, now):
            answer = self._answers.pop(request.id)
            answer.times_s += self._run_times
            self._finished(answer, "length")
        if not run.goes_on:
            self._close()
        elif self._host.lead_s <= 0:
            self._bind(run)

    def _bind(self, run: SteadyRun) -> None:
        flight = run.bind(self.now)
        self.device.take(run.lane.name, Job(flight.batch_id, flight.work, 1.0, len(flight.decodes)), self.now)

    def _close(self) -> None:
        """Ends the run of steady steps, if there is one."""
        if self._run is not None:
            self._run.close()
            for request in self._run.requests:
                self._answers[request.id].times_s += self._run_times
            self._run = None
            self._run_times = array("d")

    def _happens(self, event: Event, now: float) -> None:
        self.now = now
        for action in self._core.on_event(event, now):
            if isinstance(action, Launch):
                self.device.launch(action.lane, action.batch, now)
            elif isinstance(action, Emit):
                self._told(action.outputs)

    def _told(self, outputs: list[Output]) -> None:
        answers, now = self._answers, self.now
        for output in outputs:
            if output.tokens:
                answers[output.id].times_s.append(now)
            if output.finish is not None:
                self._finished(answers.pop(output.id), output.finish)

    def _finished(self, answer: _Answer, finish: str) -> None:
        latency = None
        if finish in ("stop", "length"):
            latency = Latency.of(answer.arrived_s - self._host.deliver_s, answer.times_s)
        self.records.add(Served(answer.arrived_s, answer.prompt_tokens, len(answer.times_s), latency))
