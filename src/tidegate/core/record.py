"""A log of a core's life: its configuration, then every event with its time and the actions it gave.

Replaying the log in a fresh core must give the same actions; that is how a bug seen while serving becomes a test. Its
requests are a workload, to be sent again or simulated (``bench.traces``).
"""

import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from tidegate.base.events import Action, Arrived, Emit, Event
from tidegate.core.config import CoreConfig
from tidegate.core.core import Core


class Entry(msgspec.Struct, array_like=True):
    now: float
    event: Event
    actions: list[Action]


_LENGTH = struct.Struct("<I")


class Recorder:
    """Wraps a core; the wrapped ``on_event`` is recorded to ``file``."""

    def __init__(self, core: Core, file: BinaryIO) -> None:
        self._core = core
        self._file = file
        self._write(msgspec.msgpack.encode(core.config))

    def on_event(self, event: Event, now: float) -> list[Action]:
        actions = self._core.on_event(event, now)
        self._write(msgspec.msgpack.encode(Entry(now, event, actions)))
        return actions

    def _write(self, body: bytes) -> None:
        self._file.write(_LENGTH.pack(len(body)) + body)
        self._file.flush()


def read_log(path: Path) -> tuple[CoreConfig, Iterator[Entry]]:
    """The configuration and the entries of a log; a last entry that was cut off is left out."""
    frames = _frames(path)
    config = msgspec.msgpack.decode(next(frames), type=CoreConfig)
    decoder = msgspec.msgpack.Decoder(Entry)
    return config, (decoder.decode(frame) for frame in frames)


def replay(path: Path) -> int:
    """Runs a log through a fresh core. Returns the number of events; raises ValueError at the first difference."""
    config, entries = read_log(path)
    core = Core(config)
    count = 0
    for count, entry in enumerate(entries, 1):
        actions = core.on_event(entry.event, entry.now)
        if msgspec.msgpack.encode(actions) != msgspec.msgpack.encode(entry.actions):
            raise ValueError(f"event {count} ({type(entry.event).__name__}) gave other actions than were recorded")
    return count


def is_log(path: Path) -> bool:
    """Whether a file begins as a log does: with a whole frame that holds a configuration."""
    try:
        msgspec.msgpack.decode(next(_frames(path)), type=CoreConfig)
    except (StopIteration, msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return True


class Asked(NamedTuple):
    """A request as it was recorded."""

    arrived_s: float
    prompt_tokens: int
    output_tokens: int  # that it got


def asked_in(path: Path) -> list[Asked]:
    """The requests of a log that got any tokens, in order of arrival."""
    arrived: dict[str, tuple[float, int]] = {}  # when, and how long the prompt is
    tokens: Counter[str] = Counter()
    for entry in read_log(path)[1]:
        if isinstance(entry.event, Arrived):
            request = entry.event.request
            arrived[request.id] = entry.now, len(request.prompt)
        for action in entry.actions:
            for output in action.outputs if isinstance(action, Emit) else ():
                tokens[output.id] += len(output.tokens)
    return [Asked(*of_request, tokens[name]) for name, of_request in arrived.items() if tokens[name]]


def _frames(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while len(head := file.read(4)) == 4:
            (length,) = _LENGTH.unpack(head)
            body = file.read(length)
            if len(body) < length:
                return
            yield body
