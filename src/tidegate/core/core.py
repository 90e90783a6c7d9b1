"""The core: one state machine that decides everything and touches nothing.

    core.on_event(event, now) -> [Launch, …, Wake, …, Resize, …, Emit]

Same events, same times, same configuration: same actions. The node loop carries actions out on real lanes, the
simulator on predicted ones.
"""

from operator import attrgetter

import msgspec

from tidegate.base.events import (
    Aborted,
    Action,
    Arrived,
    BatchDone,
    BatchEnding,
    CacheReset,
    Emit,
    Event,
    LaneGone,
    LaneLost,
    LaneReady,
    Launch,
    ModeSet,
    Resize,
    SharesSet,
    Tick,
    Tuned,
    Wake,
)
from tidegate.base.request import Output, RequestSpec
from tidegate.base.stats import Stats
from tidegate.core.answers import Answers
from tidegate.core.binding import Binder, Bound, LaneView
from tidegate.core.config import CoreConfig, check_shares, tuned
from tidegate.core.forecast import Forecast, Newcomer
from tidegate.core.guidance import Guidance
from tidegate.core.lanes import Flight, Lane
from tidegate.core.queues import Queues
from tidegate.core.request import PATIENCE_SECONDS, Request, State
from tidegate.core.residency import Residency
from tidegate.core.roster import Roster
from tidegate.core.steady import TOKEN, SteadyRun
from tidegate.policy.modes import MODES, Mode
from tidegate.policy.order import order_by_name
from tidegate.policy.rule import Budget
from tidegate.slo.belief import Belief
from tidegate.slo.gate import Gate, TimedRoom
from tidegate.slo.latency import Work
from tidegate.slo.outlook import Outlook

_plain = attrgetter("plain")


class Core:
    def __init__(self, config: CoreConfig) -> None:
        config.validate()
        self.config = config
        self.shares = dict(config.shares)  # in force while both lanes run
        self.requests: dict[str, Request] = {}  # all that have not ended
        self._roster = Roster(MODES[config.mode])
        self.lanes = self._roster.lanes
        self._queues = Queues(order_by_name(config.order, config.prefill_tokens_per_s))
        self._guidance = Guidance(config, self.mode, self._queues)
        self._residency = Residency(config)
        self._forecast = Forecast(self._queues, self._residency)
        self._binder = Binder(self._queues, self._residency)
        self._answers = Answers(self.requests, self._queues, self._residency, self._guidance)
        self._arrivals = 0
        self._now = 0.0  # of the last event

    @property
    def mode(self) -> Mode:
        return self._roster.mode

    @property
    def gate(self) -> Gate:
        return self._guidance.gate

    @property
    def belief(self) -> Belief | None:
        return self._guidance.belief

    # ---- events

    def on_event(self, event: Event, now: float) -> list[Action]:
        self._answers.begin()
        self._now = now
        actions: list[Action] = []
        match event:
            case BatchDone():
                self._batch_done(event, now)
            case Arrived():
                self._arrived(event, now)
            case Aborted():
                self._aborted(event, now)
            case BatchEnding():
                lane = self.lanes[event.lane]
                lane.ending = len(lane.flights) == 1 and lane.flights[0].batch_id == event.batch_id
            case LaneReady():
                self._lane_ready(event)
            case LaneLost():
                self._lane_lost(event, now)
            case LaneGone():
                self._answers.fail_all(event.reason, now)
            case ModeSet():
                actions += self._mode_set(event)
            case SharesSet():
                check_shares(event.shares)
                self.config = msgspec.structs.replace(self.config, shares=dict(event.shares))
                self.gate.ask(event.shares)
            case Tuned():
                self._tuned(event)
            case CacheReset():
                self._residency.blocks.clear_cached()
            case Tick():
                pass
        actions += self._launches(now)
        if self._answers.outputs:
            actions.append(Emit(self._answers.outputs))
        return actions

    def _arrived(self, event: Arrived, now: float) -> None:
        spec, config = event.request, self.config
        length = len(spec.prompt)
        retry_after_s = None
        if spec.id in self.requests:
            refusal = ("invalid", "a request with this id is running")
        elif length == 0:
            refusal = ("invalid", "the prompt has no tokens")
        elif spec.max_tokens < 1 or length + spec.max_tokens > config.max_model_len:
            refusal = (
                "invalid",
                f"{length} prompt tokens and {spec.max_tokens} new ones do not fit into {config.max_model_len} tokens",
            )
        elif config.vocab_size and (min(spec.prompt) < 0 or max(spec.prompt) >= config.vocab_size):
            refusal = ("invalid", f"prompt token ids must lie between 0 and {config.vocab_size - 1}")
        elif len(self._queues.waiting) >= config.max_waiting:
            refusal = ("rejected", f"{config.max_waiting} requests are waiting already")
        else:
            request = Request(spec, self._arrivals, now, now + self._ttft_slo_s(spec))
            wait_s, retry_after_s = self._unreachable(request, now)
            if retry_after_s is None:
                self._arrivals += 1
                self._forecast.count(length)
                self.requests[spec.id] = request
                self._guidance.arrived(request)
                self._queues.enqueue(request)
                return
            refusal = ("rejected", f"its first token would come in {wait_s:.1f} s, too late for its SLO")
        self._answers.refuse(spec.id, *refusal, retry_after_s)

    def _ttft_slo_s(self, spec: RequestSpec) -> float:
        return spec.ttft_s or (self.config.slo.ttft_s if self.config.slo else PATIENCE_SECONDS)

    def _unreachable(self, request: Request, now: float) -> tuple[float, float | None]:
        """In how many seconds its first token would come, and, if it is to be refused for that, when to try again."""
        config, spec = self.config, request.spec
        if not config.reject_unreachable or (config.slo is None and spec.ttft_s is None):
            return 0.0, None
        expected = self._forecast.of_request(request, now, self._prefill_outlook())
        return expected.ttft_s, expected.retry_after_s(request.deadline_s - now)

    def _aborted(self, event: Aborted, now: float) -> None:
        request = self.requests.get(event.request_id)
        if request is not None:
            self._answers.end(request, "abort", [], "the client left", now)

    def _batch_done(self, event: BatchDone, now: float) -> None:
        result = event.result
        lane = self.lanes[event.lane]
        flight = lane.land(result.id)
        self._account(lane, flight, result.seconds, now)
        if lane.flights:
            self._answers.batch_starts(lane.flights[0], now)
        tokens = iter(result.tokens)
        logprobs = iter(result.logprobs) if result.logprobs else None
        for request, end, samples in flight.prefills:
            request.in_flight -= 1
            token = next(tokens) if samples else None
            logprob = next(logprobs) if samples and logprobs else None
            if request.state is State.ENDED:
                self._answers.let_go(request)
                continue
            request.losses = 0
            first_block, request.done = request.done // self.config.block_size, end
            self._residency.publish(request, first_block, end // self.config.block_size)
            self._queues.rekey(request)
            if token is not None:
                del self._queues.prefilling[request.id]
                request.prompt_done()
                self._queues.decoding[request.id] = request
                self._answers.append(request, token, logprob, now, hold=lane.spec is not None and not lane.spec.decodes)
        ended, outputs = State.ENDED, self._answers.outputs
        for request, token in zip(flight.decodes, tokens, strict=True):
            logprob = next(logprobs) if logprobs else None
            request.in_flight -= 1
            if request.state is ended:
                self._answers.let_go(request)
            elif request.plain and request.first_s is not None and len(request.tokens) + 1 < request.limit:  # most
                request.tokens.append(token)
                request.losses = 0
                outputs.append(Output(request.id, [token]))
            else:
                self._answers.append(request, token, logprob, now)

    def _account(self, lane: Lane, flight: Flight, seconds: float, now: float) -> None:
        """A batch has been run, and took so long."""
        lane.count(flight, seconds)
        self._guidance.ran(lane, flight, lane.took(flight, seconds, now), now)

    def _lane_ready(self, event: LaneReady) -> None:
        lane = self._roster.lane(event.lane)
        assert not lane.flights
        lane.alive = True
        target = self._roster.target
        if target is not None and self._roster.can_enter(target):
            self._enter(target)

    def _lane_lost(self, event: LaneLost, now: float) -> None:
        """Nothing that the lane had in flight happened. What it had acknowledged stays: a lane owns nothing."""
        lane = self._roster.lane(event.lane)
        lane.alive = lane.ending = False
        lane.stats.restarts += 1
        flights = list(lane.flights)
        lane.flights.clear()
        for flight in flights:
            self._answers.batch_starts(flight, now)  # it does not, but what is known need not wait any longer
        self._give_back(flights, event.reason, now)
        for request in self.requests.values():
            if request.lane is lane:
                request.lane = None  # whoever runs it next is told again how to sample

    def _mode_set(self, event: ModeSet) -> list[Action]:
        """The new mode is in force at once if its lanes are up, else when they are; until then the old one is."""
        mode = MODES[event.mode]
        self._guidance.gate_for(self.config, mode)  # raises ConfigError where the mode's gate can't be had
        if self._roster.can_enter(mode):
            self._enter(mode)
            return []
        self._roster.target = mode
        return [Wake(spec.name) for spec in mode.lanes if not self._roster.lane(spec.name).alive]

    # ---- launching

    def _launches(self, now: float) -> list[Action]:
        """Fills every lane that has room, and fixes the share of each new batch: its lane's own while another lane
        has work in flight, the whole device when it is alone."""
        launches: list[tuple[Lane, Bound]] = []
        roster = self._roster
        for spec in roster.mode.lanes:
            lane = roster.lanes[spec.name]
            while lane.idle:
                bound = self._plan(lane, now)
                if bound is None:
                    break
                lane.take(bound.flight)
                if not bound.flight.chained:
                    self._answers.batch_starts(bound.flight, now)
                launches.append((lane, bound))
        actions: list[Action] = self._follow_gate()
        for lane, (batch, flight) in launches:
            flight.beside = roster.others_in_flight(lane)
            batch.share = flight.share = roster.share(lane, self.shares) if flight.beside else 1.0
            batch.expected_s = self._guidance.expected_s(lane, flight)
            actions.append(Launch(lane.name, batch))
        return actions

    def _follow_gate(self) -> list[Action]:
        if self.gate.shares == self.shares:
            return []
        self.shares = dict(self.gate.shares)
        return [Resize(self.shares)]

    def _plan(self, lane: Lane, now: float) -> Bound | None:
        spec, config = lane.spec, self.config
        assert spec is not None
        if not spec.decodes and (not self._queues.has_prompts or self.gate.rests(lane.name)):
            return None
        busy, ready = self._roster.others_in_flight(lane), self._roster.others_have_work(lane, self._queues)
        outlook = self.gate.outlook(spec.name, alone=not busy and not ready)
        tpot_s = config.slo.tpot_s if config.slo else None
        view = LaneView(lane, self._queues, self._residency, now, outlook, tpot_s)
        load = self._guidance.load(view, now, busy, ready)
        allowance = self.gate.allow(load)
        if allowance.hold or (not allowance.tokens and not spec.decodes):
            return None
        room = None
        if allowance.costs is not None:
            room = TimedRoom(allowance, load.decode, config.slice_quantum_tokens)
        rows = load.decode.rows
        tokens = allowance.tokens - (config.padding.padded_rows(rows) - rows)  # so that it is padded to no more
        plan = spec.rule(view, Budget(tokens, config.max_prefill_tokens, config.max_slices, room))
        return self._binder.bind(lane, plan)

    # ---- steps that are bound to come

    def steady(self, name: str) -> SteadyRun | None:
        """If the next batch of lane ``name`` is bound to be the decodes of the one in flight, unless an event comes."""
        roster, queues = self._roster, self._queues
        lane = roster.lane(name)
        if queues.has_prompts or len(lane.flights) != 1 or lane.ending or roster.others_in_flight(lane):
            return None
        flight = lane.flights[0]
        if not roster.decodes_alone(lane) or flight.prefills or flight.decodes != list(queues.decoding.values()):
            return None
        if not all(map(_plain, flight.decodes)):
            return None
        run = SteadyRun(lane, self._binder, self._residency, self._offer, self._steady_landed)
        return run if run.goes_on else None

    def _offer(self, lane: Lane, decode: Work, now: float) -> None:
        self._now = now
        self._guidance.offer(lane, decode, now)
        self._follow_gate()

    def _steady_landed(self, lane: Lane, flight: Flight, seconds: float, ended: list[Request], now: float) -> None:
        self._answers.begin()
        self._now = now
        self._account(lane, flight, seconds, now)
        for request in ended:
            self._answers.end(request, "length", [TOKEN], "", now)
        self._follow_gate()

    # ---- lanes and modes

    def _tuned(self, event: Tuned) -> None:
        """Raises ConfigError, and leaves everything as it was, if the settings do not go together."""
        config, mode = tuned(self.config, event), self._roster.target or self.mode
        # A gate that was asked for earlier may be another mode's, and waits until that is in force again.
        gate = config.gate if event.gate is not None or config.gate in mode.gates else None
        msgspec.structs.replace(config, mode=mode.name, gate=gate).validate()
        self._guidance.follow(config, self.mode)
        reordered, self.config = config.order != self.config.order, config
        if reordered:
            self._queues.reorder(order_by_name(config.order, config.prefill_tokens_per_s))

    def _enter(self, mode: Mode) -> None:
        """Requests in flight stay with the lane that has them until acknowledged; all else follows the new rules."""
        if mode is not self.mode:
            self._guidance.follow(self.config, mode)
        self._roster.enter(mode)

    def _give_back(self, flights: list[Flight], reason: str, now: float) -> None:
        """Batches did not happen: their requests are as they were before the launch, but for one loss more."""
        requests: dict[str, Request] = {}
        for flight in flights:
            for request in flight.requests():
                request.in_flight -= 1
                requests[request.id] = request
        for request in requests.values():
            if request.state is State.ENDED:
                self._answers.let_go(request)
                continue
            request.losses += 1
            request.lane = None
            if request.state is State.PREFILLING:
                request.launched = request.done
                self._queues.rekey(request)
            if request.losses >= self.config.max_losses:
                why = f"its batch failed {request.losses} times; the last time: {reason}"
                self._answers.end(request, "error", [], why, now)

    # ---- readings

    def predicted_ttft_s(self, prompt_tokens: int, now: float, priority: int = 0, ttft_s: float | None = None) -> float:
        """Seconds to the first token of a prompt that would arrive now, none of it cached (``slo.admission``).
        ``ttft_s``: its SLO, by which some orders place it; None: the engine's."""
        if ttft_s is None:
            ttft_s = self.config.slo.ttft_s if self.config.slo else PATIENCE_SECONDS
        newcomer = Newcomer(now, now + ttft_s, 0, prompt_tokens)
        return self._forecast.of(newcomer, priority, now, self._prefill_outlook()).ttft_s

    def _prefill_outlook(self) -> Outlook:
        spec = next(spec for spec in self.mode.lanes if spec.prefills)
        alone = not self._queues.decoding or len(self.mode.lanes) == 1
        return self.gate.outlook(spec.name, alone)

    def stats(self) -> Stats:
        residency, blocks, config = self._residency, self._residency.blocks, self.config
        for lane in self.lanes.values():
            lane.stats.alive = lane.alive
            lane.stats.phases = lane.spec.phases if lane.spec else ""
            lane.stats.share = self._roster.share(lane, self.shares) if lane.spec else 0.0
            lane.stats.inflight = len(lane.flights)
        return Stats(
            mode=self.mode.name,
            waiting=len(self._queues.waiting),
            prefilling=len(self._queues.prefilling),
            decoding=len(self._queues.decoding),
            predicted_ttft_s=self.predicted_ttft_s(round(self._forecast.mean_prompt_tokens), self._now),
            blocks_total=blocks.num_blocks,
            blocks_free=blocks.num_free,
            blocks_cached=blocks.num_cached,
            blocks_used=blocks.num_used,
            prefix_queries_tokens=residency.queried_tokens,
            prefix_hits_tokens=residency.hit_tokens,
            handovers=self._binder.totals.handovers,
            preemptions=self._binder.totals.preemptions,
            finished=dict(self._answers.finished),
            late=sum(r.late for r in (*self._queues.waiting, *self._queues.prefilling.values())),
            order=config.order,
            max_num_batched_tokens=config.max_num_batched_tokens,
            slice_ms=config.slice_seconds * 1e3,
            gate=self.gate.name,
            gate_choices=dict(self.gate.choices),
            gate_moves=self.gate.moves,
            slo_ttft_s=config.slo.ttft_s if config.slo else None,
            slo_tpot_s=config.slo.tpot_s if config.slo else None,
            slo_metric=str(config.slo.metric) if config.slo else "",
            prediction_errors=self.belief.accuracy() if self.belief else {},
            prediction_factors=self.belief.factors if self.belief else {},
            lanes={name: lane.stats for name, lane in self.lanes.items()},
        )
