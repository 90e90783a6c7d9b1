"""Which lanes there are, and the mode in force, which says what each of them does."""

from tidegate.core.lanes import Lane
from tidegate.core.queues import Queues
from tidegate.policy.modes import Mode


class Roster:
    def __init__(self, mode: Mode) -> None:
        self.lanes: dict[str, Lane] = {}  # all that were ever named, of whichever mode
        self.target: Mode | None = None  # a mode that waits for its lanes to start
        self.enter(mode)

    def lane(self, name: str) -> Lane:
        if name not in self.lanes:
            self.lanes[name] = Lane(name)
        return self.lanes[name]

    def can_enter(self, mode: Mode) -> bool:
        return all(self.lane(spec.name).alive for spec in mode.lanes)

    def enter(self, mode: Mode) -> None:
        self.mode = mode
        self.target = None
        for lane in self.lanes.values():
            lane.spec = None
        for spec in mode.lanes:
            self.lane(spec.name).spec = spec

    def share(self, lane: Lane, shares: dict[str, float]) -> float:
        """A lane's part of the device while another one runs."""
        return shares[lane.name] if len(self.mode.lanes) > 1 else 1.0

    def decodes_alone(self, lane: Lane) -> bool:
        return [spec for spec in self.mode.lanes if spec.decodes] == [lane.spec]

    def others_in_flight(self, lane: Lane) -> bool:
        lanes = self.lanes.values()
        return len(lanes) > 1 and any(other is not lane and other.flights for other in lanes)

    def others_have_work(self, lane: Lane, queues: Queues) -> bool:
        """Whether another lane of the mode is likely to be given a batch at this event."""
        for spec in self.mode.lanes:
            if spec.name != lane.name and self.lanes[spec.name].alive:
                prefill = spec.prefills and (queues.waiting or queues.prefilling)
                decode = spec.decodes and queues.decoding
                if prefill or decode:
                    return True
        return False
