"""The core: one state machine that decides everything and touches nothing.

    core.on_event(event, now) -> [Launch, …, Wake, …, Resize, …, Emit]

Same events, same times, same configuration: same actions. The node loop carries actions out on real lanes, the
simulator on predicted ones.
"""

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
    Wake,
)
from tidegate.base.request import Output, TokenLogprob
from tidegate.base.stats import Stats
from tidegate.core.binding import Binder, Bound, LaneView
from tidegate.core.config import CoreConfig, check_shares
from tidegate.core.lanes import Flight, Lane
from tidegate.core.queues import Queues
from tidegate.core.request import Request, State
from tidegate.core.residency import Residency
from tidegate.policy.modes import MODES, Mode
from tidegate.policy.order import order_by_name
from tidegate.policy.rule import Budget
from tidegate.slo.rate import PrefillRate


class Core:
    def __init__(self, config: CoreConfig) -> None:
        config.validate()
        self.config = config
        self.mode: Mode = MODES[config.mode]
        self.shares = dict(config.shares)
        self.lanes: dict[str, Lane] = {}
        self.requests: dict[str, Request] = {}  # all that have not ended
        self._target: Mode | None = None  # a mode that waits for its lanes to start
        self._queues = Queues(order_by_name(config.order, config.prefill_tokens_per_s))
        self._residency = Residency(config)
        self._binder = Binder(self._queues, self._residency)
        self._arrivals = 0
        self._finished: dict[str, int] = {}
        self._outputs: list[Output] = []
        self._enter(self.mode)

    # ---- events

    def on_event(self, event: Event, now: float) -> list[Action]:
        self._outputs = []
        actions: list[Action] = []
        match event:
            case BatchDone():
                self._batch_done(event)
            case Arrived():
                self._arrived(event, now)
            case Aborted():
                self._aborted(event)
            case BatchEnding():
                lane = self.lanes[event.lane]
                lane.ending = len(lane.flights) == 1 and lane.flights[0].batch_id == event.batch_id
            case LaneReady():
                self._lane_ready(event)
            case LaneLost():
                self._lane_lost(event)
            case LaneGone():
                self._fail_all(event.reason)
            case ModeSet():
                actions += self._mode_set(event)
            case SharesSet():
                check_shares(event.shares)
                self.shares = dict(event.shares)
                actions.append(Resize(event.shares))
            case CacheReset():
                self._residency.blocks.clear_cached()
            case Tick():
                pass
        actions += self._launches()
        if self._outputs:
            actions.append(Emit(self._outputs))
        return actions

    def _arrived(self, event: Arrived, now: float) -> None:
        spec, config = event.request, self.config
        length = len(spec.prompt)
        if spec.id in self.requests:
            refusal = ("invalid", "a request with this id is running")
        elif length == 0:
            refusal = ("invalid", "the prompt has no tokens")
        elif spec.max_tokens < 1 or length + spec.max_tokens > config.max_model_len:
            refusal = (
                "invalid",
                f"{length} prompt tokens and {spec.max_tokens} new ones do not fit into {config.max_model_len} tokens",
            )
        elif min(spec.prompt) < 0 or max(spec.prompt) >= config.vocab_size:
            refusal = ("invalid", f"prompt token ids must lie between 0 and {config.vocab_size - 1}")
        elif len(self._queues.waiting) >= config.max_waiting:
            refusal = ("rejected", f"{config.max_waiting} requests are waiting already")
        else:
            request = Request(spec, self._arrivals, now)
            self._arrivals += 1
            self.requests[spec.id] = request
            self._queues.enqueue(request)
            return
        self._count(refusal[0])
        self._outputs.append(Output(spec.id, [], *refusal))

    def _aborted(self, event: Aborted) -> None:
        request = self.requests.get(event.request_id)
        if request is not None:
            self._end(request, "abort", [], "the client left")

    def _batch_done(self, event: BatchDone) -> None:
        result = event.result
        lane = self.lanes[event.lane]
        flight = lane.land(result.id)
        lane.observe(flight, result.seconds)
        tokens = iter(result.tokens)
        logprobs = iter(result.logprobs) if result.logprobs else None
        for request, end, samples in flight.prefills:
            request.in_flight -= 1
            token = next(tokens) if samples else None
            logprob = next(logprobs) if samples and logprobs else None
            if request.state is State.ENDED:
                self._let_go(request)
                continue
            request.losses = 0
            first_block, request.done = request.done // self.config.block_size, end
            self._residency.publish(request, first_block, end // self.config.block_size)
            self._queues.rekey(request)
            if token is not None:
                del self._queues.prefilling[request.id]
                request.prompt_done()
                self._queues.decoding[request.id] = request
                self._append(request, token, logprob, hold=len(self.mode.lanes) > 1)
        for request, token in zip(flight.decodes, tokens, strict=True):
            logprob = next(logprobs) if logprobs else None
            request.in_flight -= 1
            if request.state is State.ENDED:
                self._let_go(request)
                continue
            self._append(request, token, logprob)

    def _lane_ready(self, event: LaneReady) -> None:
        lane = self._lane(event.lane)
        assert not lane.flights
        lane.alive = True
        if self._target is not None and self._can_enter(self._target):
            self._enter(self._target)

    def _lane_lost(self, event: LaneLost) -> None:
        """Nothing that the lane had in flight happened. What it had acknowledged stays: a lane owns nothing."""
        lane = self._lane(event.lane)
        lane.alive = lane.ending = False
        lane.stats.restarts += 1
        flights = list(lane.flights)
        lane.flights.clear()
        self._give_back(flights, event.reason)
        for request in self.requests.values():
            if request.lane is lane:
                request.lane = None  # whoever runs it next is told again how to sample

    def _mode_set(self, event: ModeSet) -> list[Action]:
        """The new mode is in force at once if its lanes are up, else when they are; until then the old one is."""
        mode = MODES[event.mode]
        if self._can_enter(mode):
            self._enter(mode)
            return []
        self._target = mode
        return [Wake(spec.name) for spec in mode.lanes if not self._lane(spec.name).alive]

    # ---- launching

    def _launches(self) -> list[Action]:
        """Fills every lane that has room, and fixes the share of each new batch: its lane's own while another lane
        has work in flight, the whole device when it is alone."""
        launches: list[tuple[Lane, Bound]] = []
        for spec in self.mode.lanes:
            lane = self.lanes[spec.name]
            while lane.idle:
                bound = self._plan(lane)
                if bound is None:
                    break
                lane.take(bound.flight)
                self._outputs += bound.released
                launches.append((lane, bound))
        actions: list[Action] = []
        for lane, (batch, flight, _) in launches:
            batch.share = flight.share = self._share(lane) if self._others_in_flight(lane) else 1.0
            actions.append(Launch(lane.name, batch))
        return actions

    def _plan(self, lane: Lane) -> Bound | None:
        assert lane.spec is not None
        config = self.config
        alone = not self._others_in_flight(lane) and not self._others_have_work(lane)
        tokens = lane.rate.tokens_within(
            config.slice_seconds,
            1.0 if alone else self._share(lane),
            min(config.min_slice_tokens, config.max_num_batched_tokens),
            config.max_num_batched_tokens,
        )
        view = LaneView(lane, self._queues, self._residency)
        plan = lane.spec.rule(view, Budget(tokens, config.max_slices))
        return self._binder.bind(lane, plan)

    def _share(self, lane: Lane) -> float:
        return self.shares[lane.name] if len(self.mode.lanes) > 1 else 1.0

    def _others_in_flight(self, lane: Lane) -> bool:
        return any(other is not lane and other.flights for other in self.lanes.values())

    def _others_have_work(self, lane: Lane) -> bool:
        """Whether another lane of the mode is likely to be given a batch at this event."""
        queues = self._queues
        for spec in self.mode.lanes:
            if spec.name != lane.name and self.lanes[spec.name].alive:
                prefill = "P" in spec.phases and (queues.waiting or queues.prefilling)
                decode = "D" in spec.phases and queues.decoding
                if prefill or decode:
                    return True
        return False

    # ---- lanes and modes

    def _lane(self, name: str) -> Lane:
        if name not in self.lanes:
            rate = PrefillRate(self.config.prefill_tokens_per_s, self.config.slice_quantum_tokens)
            self.lanes[name] = Lane(name, rate)
        return self.lanes[name]

    def _can_enter(self, mode: Mode) -> bool:
        return all(self._lane(spec.name).alive for spec in mode.lanes)

    def _enter(self, mode: Mode) -> None:
        """Requests in flight stay with the lane that has them until acknowledged; all else follows the new rules."""
        self.mode = mode
        self._target = None
        for lane in self.lanes.values():
            lane.spec = None
        for spec in mode.lanes:
            self._lane(spec.name).spec = spec

    def _give_back(self, flights: list[Flight], reason: str) -> None:
        """Batches did not happen: their requests are as they were before the launch, but for one loss more."""
        requests: dict[str, Request] = {}
        for flight in flights:
            for request in flight.requests():
                request.in_flight -= 1
                requests[request.id] = request
        for request in requests.values():
            if request.state is State.ENDED:
                self._let_go(request)
                continue
            request.losses += 1
            request.lane = None
            if request.state is State.PREFILLING:
                request.launched = request.done
                self._queues.rekey(request)
            if request.losses >= self.config.max_losses:
                self._end(request, "error", [], f"its batch failed {request.losses} times; the last time: {reason}")

    # ---- ends

    def _append(self, request: Request, token: int, logprob: TokenLogprob | None, hold: bool = False) -> None:
        """A token has come. ``hold``: another lane will decode next, and is in the middle of a step; the token is told
        when that lane's next step starts, so that the wait for it counts to TTFT and not to the gap that follows."""
        request.tokens.append(token)
        request.losses = 0
        finish = None
        if token in request.stop_ids:
            finish = "stop"
        elif len(request.tokens) >= request.limit:
            finish = "length"
        if request.held is not None:
            self._release(request)
        if finish is None and logprob is None and request.reported:
            self._outputs.append(Output(request.id, [token]))
            return
        logprobs = [logprob] if logprob is not None else None
        if finish is None:
            output = Output(request.id, [token], logprobs=logprobs, cached_tokens=self._cached(request))
            if hold:
                request.held = output
            else:
                self._outputs.append(output)
        else:
            self._end(request, finish, [token], "", logprobs)

    def _end(
        self, request: Request, finish: str, tokens: list[int], reason: str, logprobs: list[TokenLogprob] | None = None
    ) -> None:
        """The one terminal Output of a request."""
        if request.held is not None:
            self._release(request)
        self._queues.remove(request)
        if request.state is State.DECODING:
            self._residency.publish_decoded(request)
        request.end()
        del self.requests[request.id]
        self._count(finish)
        self._outputs.append(Output(request.id, tokens, finish, reason, logprobs, self._cached(request)))
        self._let_go(request)

    def _release(self, request: Request) -> None:
        assert request.held is not None
        self._outputs.append(request.held)
        request.held = None

    def _let_go(self, request: Request) -> None:
        if request.in_flight == 0:
            self._residency.release(request)

    def _fail_all(self, reason: str) -> None:
        for request in list(self.requests.values()):
            self._end(request, "error", [], reason)

    def _cached(self, request: Request) -> int:
        """``cached_tokens`` for an Output: told once."""
        if request.reported:
            return 0
        request.reported = True
        return request.cached_tokens

    def _count(self, finish: str) -> None:
        self._finished[finish] = self._finished.get(finish, 0) + 1

    # ---- readings

    def stats(self) -> Stats:
        residency, blocks = self._residency, self._residency.blocks
        for lane in self.lanes.values():
            lane.stats.alive = lane.alive
            lane.stats.phases = lane.spec.phases if lane.spec else ""
            lane.stats.share = self._share(lane) if lane.spec else 0.0
            lane.stats.inflight = len(lane.flights)
        return Stats(
            mode=self.mode.name,
            waiting=len(self._queues.waiting),
            prefilling=len(self._queues.prefilling),
            decoding=len(self._queues.decoding),
            blocks_total=blocks.num_blocks,
            blocks_free=blocks.num_free,
            blocks_cached=blocks.num_cached,
            blocks_used=blocks.num_used,
            prefix_queries_tokens=residency.queried_tokens,
            prefix_hits_tokens=residency.hit_tokens,
            handovers=self._binder.totals.handovers,
            preemptions=self._binder.totals.preemptions,
            finished=dict(self._finished),
            lanes={name: lane.stats for name, lane in self.lanes.items()},
        )
