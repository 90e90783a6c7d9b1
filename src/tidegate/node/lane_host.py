"""The seam between the node's loop and its lanes: processes here, threads on a GPU."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

from tidegate.base.batch import Batch
from tidegate.base.events import Event


class LaneReading(NamedTuple):
    """What a lane really has of the device and did with it; 0, or nothing, where that is not known or means nothing."""

    sms: int = 0
    extra_memory_bytes: int = 0  # graphs, workspaces and activations
    hybrid_attention: Mapping[str, int] = MappingProxyType({})  # see LaneStats


class LaneHost(Protocol):
    """Starts lanes, launches batches on them, and turns what they do into events."""

    def start(self, lane: str) -> None:
        """Begins to start a lane; LaneReady or LaneLost follows. Does nothing if it is up or starting."""
        ...

    def launch(self, lane: str, batch: Batch) -> None:
        """Applies the batch's block-table updates to the pool, then gives it to the lane."""
        ...

    def prepare_shares(self, shares: dict[str, float]) -> None:
        """Lanes will soon be given batches with these shares: make ready without delaying what runs."""
        ...

    def reading(self, lane: str, alone: bool) -> LaneReading:
        """Of a lane that has the device to itself, or divides it with another. Never blocks."""
        ...

    def watch(self, register: Callable[[int, Callable[[], list[Event]]], None], forget: Callable[[int], None]) -> None:
        """From now on every lane's file descriptor is registered with what to call when it is readable."""
        ...

    def pids(self) -> dict[str, int]: ...

    def close(self) -> None:
        """Ends all lanes and waits for them."""
        ...
