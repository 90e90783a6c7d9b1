"""Where a lane's kernels run, and the ways of sharing a GPU: one says for a lane and a share which place that is. Lanes
do not ask which way it is.

    disjoint  P on the first SMs and D on the rest while both run (green contexts)
    capped    P on the first SMs, D over the whole device always, so that its graphs are captured once
    streams   no division: two streams, D's before P's where both have a kernel to start (what others do; to compare)

Besides there is "mps", where lanes are processes and the driver's service divides (``device.mps``).

A lane that is alone has the whole device in each of them. Kernels in a graph keep the priority of the stream on which
they were captured, as they keep its SMs.
"""

import threading
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

HIGH_PRIORITY = -1  # of a stream; 0 is the lowest


class Part(NamedTuple):
    """``first``: the first ``sms`` SMs; otherwise what a split of the device leaves when they are taken off."""

    sms: int
    first: bool


class Divisible(Protocol):
    """A device whose SMs can be divided; see ``device.green_contexts``."""

    @property
    def total(self) -> int: ...

    def pair(self, share: float) -> tuple[Part, Part]: ...

    def new_stream(self, part: Part | None, priority: int) -> torch.cuda.Stream: ...


@dataclass(frozen=True, eq=False)
class Place:
    """SMs, a stream whose kernels run on them, and another one on which graphs for the first are captured, so that a
    capture does not wait for a step. One place is one object. Without streams: the CPU."""

    sms: int = 0
    stream: torch.cuda.Stream | None = None
    capture_stream: torch.cuda.Stream | None = None
    part: Part | None = None  # None: all SMs


@dataclass(frozen=True)
class Form:
    """A way of sharing."""

    name: str
    description: str
    divided: tuple[str, ...]  # lanes that are kept to their part while another runs
    first: tuple[str, ...] = ()  # lanes whose kernels start before others'


FORMS = {
    form.name: form
    for form in (
        Form("disjoint", "disjoint sets of SMs (green contexts)", divided=("P", "D")),
        Form("capped", "a set of SMs for prefill, decode on all (green context)", divided=("P",), first=("D",)),
        Form("streams", "streams with priorities, undivided", divided=(), first=("D",)),
    )
}

MPS = "mps"  # the form in which lanes are processes, each with a share of its own: places are not what it divides by


class Places:
    """The places of one device under one form, made when they are first asked for. Each is used by one lane only."""

    def __init__(self, device: Divisible, form: Form) -> None:
        self.form = form
        self._device = device
        self._places: dict[tuple[str, Part | None], Place] = {}
        self._lock = threading.Lock()

    def of(self, lane: str, share: float) -> Place:
        """Where a batch of lane "P" or "D" runs that has ``share`` of the device."""
        return self.at(lane, self._part(lane, share))

    def at(self, lane: str, part: Part | None) -> Place:
        """The same by the part itself; None for the whole device."""
        with self._lock:
            place = self._places.get((lane, part))
            if place is None:
                place = self._places[lane, part] = self._make(lane, part)
        return place

    def _part(self, lane: str, share: float) -> Part | None:
        if share >= 1.0 or lane not in self.form.divided:
            return None
        first, rest = self._device.pair(share if lane == "P" else 1.0 - share)
        return first if lane == "P" else rest

    def _make(self, lane: str, part: Part | None) -> Place:
        priority = HIGH_PRIORITY if lane in self.form.first else 0
        stream, capture_stream = (self._device.new_stream(part, priority) for _ in range(2))
        return Place(part.sms if part else self._device.total, stream, capture_stream, part)
