"""From a rule's plan to a batch: who is in it is fixed here, blocks are allocated here, nowhere else."""

from collections.abc import Iterator
from typing import NamedTuple

from tidegate.base.batch import Batch, Slice, SlotSetup, TableUpdate
from tidegate.core.lanes import Flight, Lane, PrefillRow
from tidegate.core.queues import Queues
from tidegate.core.request import Request, State
from tidegate.core.residency import Residency
from tidegate.policy.late_decodes import yielding
from tidegate.policy.rule import Plan
from tidegate.slo.latency import Work
from tidegate.slo.outlook import Outlook


class Totals:
    """What happened since the start, for statistics."""

    def __init__(self) -> None:
        self.handovers = 0
        self.preemptions = 0


class LaneView:
    """The queues as one lane may use them (``policy.rule.View``). A request with work in flight belongs to the lane
    that has it until that is acknowledged."""

    def __init__(
        self, lane: Lane, queues: Queues, residency: Residency, now: float, outlook: Outlook, tpot_s: float | None
    ) -> None:
        """``tpot_s``: the SLO's, if there is one."""
        self.lane = lane
        self._now, self._tpot_s = now, tpot_s
        self._queues = queues
        self._residency = residency
        self.prompts: list[Request] = []  # in the order in which the lane will serve them
        if lane.spec is not None and lane.spec.prefills:
            started = [r for r in queues.prefilling.values() if r.remaining and (not r.in_flight or r.lane is lane)]
            self.prompts = queues.arranged(started, now, outlook)
        self._decodes: list[Request] | None = None  # once somebody has asked

    def prefills(self) -> Iterator[Request]:
        blocked = False
        for request in self.prompts:
            if request.state is State.WAITING:
                blocked = blocked or not self._admit(request)
                if blocked:
                    continue  # nobody who waits behind it is let past
            if request.remaining:
                yield request

    def decoding(self) -> Work:
        """What the next token of everybody who decodes asks of the device."""
        rows = self.decodes()
        return Work(rows=len(rows), context=sum([len(r.tokens) + r.in_flight for r in rows]))

    def decodes(self) -> list[Request]:
        if self._decodes is None:
            self._decodes = self._ready()
            if self.prompts and self._tpot_s is not None:
                self._decodes = yielding(self._decodes, self.prompts, self._now, self._tpot_s)
        return self._decodes

    def _ready(self) -> list[Request]:
        """Those whose next input is known, or will be when the lane's own batch in flight has run: a lane may read
        what it wrote from its next launch on, also the first token of a prompt that it has just finished."""
        lane, queues = self.lane, self._queues
        ready = [
            r
            for r in queues.decoding.values()
            if not r.in_flight or (r.lane is lane and len(r.tokens) + r.in_flight < r.limit)
        ]
        ready += [
            r
            for r in queues.prefilling.values()
            if r.in_flight and r.lane is lane and not r.remaining and len(r.tokens) + r.in_flight < r.limit
        ]
        return ready

    def _admit(self, request: Request) -> bool:
        """Whether it is admitted, or has to wait."""
        if not self._residency.admit(request):
            return False
        self._queues.dequeue(request)
        request.admit()
        self._queues.prefilling[request.id] = request
        return True


class Bound(NamedTuple):
    batch: Batch
    flight: Flight


class Binder:
    def __init__(self, queues: Queues, residency: Residency) -> None:
        self._queues = queues
        self._residency = residency
        self._next_batch_id = 0
        self.totals = Totals()

    def bind(self, lane: Lane, plan: Plan) -> Bound | None:
        """The batch for a plan, with ``share`` still to be set; None if nobody in the plan can run now."""
        tables: list[TableUpdate] = []
        setups: list[SlotSetup] = []
        decodes: list[Request] = []
        slots: list[int] = []
        positions: list[int] = []
        starting: list[Request] = []
        for r in plan.decodes:
            position = len(r.tokens) - 1 + r.in_flight
            if r.lane is not lane or r.prefill_lane is not None or position >= r.capacity:  # few
                if r.state is State.WAITING:
                    continue  # preempted for a row above
                if position >= r.capacity and not self._make_room(r):
                    continue
                if r.tabled < len(r.blocks):
                    tables.append(_table_update(r))
                if r.lane is not lane:
                    setups.append(self._move(r, lane))
                if r.prefill_lane is not None:
                    self.totals.handovers += r.prefill_lane != lane.name
                    r.prefill_lane = None
                    if r.held is not None:
                        starting.append(r)
            r.in_flight += 1
            decodes.append(r)
            slots.append(r.slot)
            positions.append(position)
        slices: list[Slice] = []
        prefills: list[PrefillRow] = []
        for r, count in plan.prefills:
            if r.state is not State.PREFILLING:
                continue
            if r.tabled < len(r.blocks):
                tables.append(_table_update(r))
            if r.lane is not lane:
                setups.append(self._move(r, lane))
            start, end = r.launched, r.launched + count
            samples = end == len(r.tokens)
            history = r.tokens[:start] if start == r.skipped > 0 and r.spec.sampling.needs_history else None
            slices.append(Slice(r.slot, start, r.tokens[start:end], samples, history))
            prefills.append(PrefillRow(r, end, samples))
            r.launched = end
            r.in_flight += 1
            r.prefill_lane = lane.name
            self._queues.order.served(r, count)
        if not slices and not decodes:
            return None
        fused = lane.spec is not None and lane.spec.fused
        batch = Batch(self.next_id(), 1.0, slices, slots, positions, tables, setups, fused)
        return Bound(batch, Flight(batch.id, 1.0, prefills, decodes, Work.of(batch), starting=starting))

    def next_id(self) -> int:
        """Of a batch."""
        self._next_batch_id += 1
        return self._next_batch_id - 1

    def preempt(self, request: Request) -> None:
        """Takes an idle request off the device; it will be computed again when there is room."""
        del (self._queues.prefilling if request.state is State.PREFILLING else self._queues.decoding)[request.id]
        if request.state is State.DECODING:
            self._residency.publish_decoded(request)
        self._residency.release(request)
        request.preempt()
        self._queues.enqueue(request)
        self.totals.preemptions += 1

    def _make_room(self, request: Request) -> bool:
        """One more block for ``request``, at the cost of the idle resident that came last.

        That may be ``request`` itself. The one that came first is never the victim, so somebody always advances.
        """
        while not self._residency.grow(request):
            idle = [r for r in self._queues.admitted() if not r.in_flight]
            if not idle:
                return False  # all others are in flight; what they hold comes back when they are acknowledged
            victim = max(idle, key=lambda r: (r.spec.priority, r.seq))
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def _move(self, request: Request, lane: Lane) -> SlotSetup:
        """From now on ``lane`` computes for this request: tell it how to sample. Its KV stays where it is."""
        request.lane = lane
        return SlotSetup(request.slot, request.prompt_tokens, request.spec.sampling)


def _table_update(request: Request) -> TableUpdate:
    update = TableUpdate(request.slot, request.tabled, request.blocks[request.tabled :])
    request.tabled = len(request.blocks)
    return update
