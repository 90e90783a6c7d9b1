"""The core on a virtual clock: launches are answered by predicted completions, nothing waits for real time."""

import heapq
from collections.abc import Callable

from tidegate.base.batch import Batch
from tidegate.base.events import Action, BatchDone, BatchEnding, Emit, Event, LaneLost, LaneReady, Launch, Wake
from tidegate.base.request import Output
from tidegate.core.core import Core
from tidegate.sim.device import FakeDevice

Predict = Callable[[str, Batch], float]  # lane and batch -> seconds


class Simulation:
    """Feeds a core and collects its outputs.

        simulation.at(0.5, Arrived(request))
        simulation.run()
        simulation.outputs["request id"]

    A batch happens on the device at its end, so that anything which changes memory under it in the meantime shows.
    """

    START_SECONDS = 0.5  # from Wake to LaneReady

    def __init__(self, core: Core, device: FakeDevice, predict: Predict, ending: float | None = None) -> None:
        """``ending``: the fraction of a batch's time after which its lane says that it is about to end, if it does."""
        self.core = core
        self.device = device
        self.now = 0.0
        self.outputs: dict[str, list[Output]] = {}
        self.log: list[tuple[float, Event, list[Action]]] = []
        self._predict = predict
        self._ending = ending
        self._queue: list[tuple[float, int, Event | Batch, str, int]] = []
        self._sequence = 0
        self._epoch: dict[str, int] = {}
        self._busy_until: dict[str, float] = {}
        for spec in core.mode.lanes:
            self.at(0.0, LaneReady(spec.name))

    def at(self, time: float, event: Event) -> None:
        self._push(time, event, "", 0)

    def lose_lane(self, lane: str, time: float, back_after: float) -> None:
        self.at(time, LaneLost(lane, "killed"))
        self.at(time + back_after, LaneReady(lane))

    def run(self, until: float = float("inf"), observe: Callable[[], None] = lambda: None) -> None:
        """Until nothing is left to happen. ``observe`` is called after every event."""
        while self._queue and self._queue[0][0] <= until:
            time, _, item, lane, epoch = heapq.heappop(self._queue)
            self.now = max(self.now, time)
            if isinstance(item, Batch):
                if epoch != self._epoch.get(lane, 0):
                    continue  # its lane was lost before it ended
                event: Event = BatchDone(lane, self.device.run(item, self._predict(lane, item)))
            else:
                event = item
                if isinstance(event, LaneLost):
                    if not self.core.lanes[event.lane].alive:
                        continue
                    self._epoch[event.lane] = self._epoch.get(event.lane, 0) + 1
                    self._busy_until[event.lane] = self.now
                elif (
                    isinstance(event, LaneReady) and event.lane in self.core.lanes and self.core.lanes[event.lane].alive
                ):
                    continue
            self._carry_out(event, self.core.on_event(event, self.now))
            observe()

    def _carry_out(self, event: Event, actions: list[Action]) -> None:
        self.log.append((self.now, event, actions))
        for action in actions:
            if isinstance(action, Launch):
                self.device.apply(action.batch.tables)
                start = max(self.now, self._busy_until.get(action.lane, 0.0))
                seconds = self._predict(action.lane, action.batch)
                end = start + seconds
                if self._ending is not None:
                    self.at(start + self._ending * seconds, BatchEnding(action.lane, action.batch.id))
                self._busy_until[action.lane] = end
                self._push(end, action.batch, action.lane, self._epoch.get(action.lane, 0))
            elif isinstance(action, Emit):
                for output in action.outputs:
                    self.outputs.setdefault(output.id, []).append(output)
            elif isinstance(action, Wake):
                self.at(self.now + self.START_SECONDS, LaneReady(action.lane))

    def _push(self, time: float, item: Event | Batch, lane: str, epoch: int) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (time, self._sequence, item, lane, epoch))
