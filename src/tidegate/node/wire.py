"""Everything that crosses a process boundary: typed records, msgpack-coded, in length-prefixed frames.

    server process  ── NodeInit, Submit, Abort, Ask, Shutdown ──▶  node process (core, pool)
                    ◀── Progress, ModelFound, Ready, Outputs, Reply, Fatal ──
    node process    ── LaneInit or GpuLaneInit, RunBatch, StopLane ──▶  lane process (one for each lane, or more)
                    ◀── LaneUp, LaneEnding, LaneResult, LaneFailure ──
    node process    ── RankInit, StartLane, PrepareStep, RunStep, StepDone, StopRank ──▶  rank process (one a GPU)
                    ◀── RankFailure ──

A frame is a 4-byte little-endian length and that many bytes of msgpack. Nothing is ever pickled, and no message
names code. This module imports neither torch nor the core, so the server can use it.
"""

import asyncio
import collections
import socket
import struct
from typing import Any

import msgspec

from tidegate.base.batch import Batch, BatchResult
from tidegate.base.events import Tuned
from tidegate.base.request import Output, RequestSpec
from tidegate.base.specs import ModelSpec, PoolSpec, Region
from tidegate.base.stats import Stats
from tidegate.node.config import EngineConfig
from tidegate.runner.shapes import StepShape
from tidegate.slo.gate import Limits

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 30


# ---- server → node


class NodeInit(msgspec.Struct, tag="init"):
    """The first message of all."""

    config: EngineConfig


class Submit(msgspec.Struct, tag="submit"):
    request: RequestSpec


class Abort(msgspec.Struct, tag="abort"):
    request_id: str


class Ask(msgspec.Struct, tag="ask"):
    """A question or an order that is answered by one Reply with the same ``seq``.

    Exactly one field besides ``seq`` is set; with none it asks for the statistics only.
    """

    seq: int
    mode: str | None = None
    shares: dict[str, float] | None = None
    tuned: Tuned | None = None
    reset_prefix_cache: bool = False


class Shutdown(msgspec.Struct, tag="shutdown"):
    """End all lanes and exit with status 0. Requests still running end as aborted."""


ToNode = NodeInit | Submit | Abort | Ask | Shutdown


# ---- node → server


class Progress(msgspec.Struct, tag="progress"):
    """``fraction`` of a start-up stage that is done, 0 to 1."""

    stage: str
    fraction: float


class ModelFound(msgspec.Struct, tag="model_found"):
    """The model's files are there; ``tokenizer`` is a directory or a .gguf file, None for a model without one."""

    tokenizer: str | None


class EngineInfo(msgspec.Struct, frozen=True):
    """What the server needs to know of the engine that it fronts."""

    model: ModelSpec
    pool: PoolSpec
    mode: str
    modes: list[str]
    max_model_len: int
    weight_bytes: int
    kv_bytes: int
    device: str  # for people: "cpu, 2 cores"
    sharing: str  # for people: "core sets"
    start_seconds: float
    lane_pids: dict[str, int]
    limits: Limits | None = None  # of batches, as the engine was started
    predictions: str = ""  # for people: where they come from and how good they are; "" where nobody needs any


class Ready(msgspec.Struct, tag="ready"):
    info: EngineInfo


class Outputs(msgspec.Struct, tag="outputs"):
    outputs: list[Output]


class Reply(msgspec.Struct, tag="reply"):
    """``error`` is empty when the order was carried out."""

    seq: int
    stats: Stats
    error: str = ""


class Fatal(msgspec.Struct, tag="fatal"):
    """The node can't go on, and exits. ``config``: the user's settings are to blame (exit code 2)."""

    reason: str
    config: bool = False


FromNode = Progress | ModelFound | Ready | Outputs | Reply | Fatal


# ---- node → lane


class LaneInit(msgspec.Struct, tag="lane_init"):
    """``regions`` lie in the memory file whose descriptor the process was started with."""

    lane: str
    model: ModelSpec
    pool: PoolSpec
    regions: list[Region]
    shared_bytes: int
    cores: tuple[int, ...]  # that the lanes divide among themselves
    meeting_place: str = ""  # a directory where the lane's ranks find each other, where there are several


class GpuLaneInit(msgspec.Struct, tag="gpu_lane_init"):
    """Comes after two file descriptors (``node.shared_fds``): of the device memory in which ``regions`` lie, and of a
    memory file that holds the block table alone."""

    lane: str
    model: ModelSpec
    pool: PoolSpec
    regions: list[Region]
    shared_bytes: int  # of the device memory
    ladder: list[StepShape]  # of its graphs
    eager: bool  # steps can't be graphs
    first: bool  # its kernels are started before those of other lanes


class RunBatch(msgspec.Struct, tag="run"):
    batch: Batch


class StopLane(msgspec.Struct, tag="stop"):
    pass


ToLane = LaneInit | GpuLaneInit | RunBatch | StopLane


# ---- lane → node


class LaneUp(msgspec.Struct, tag="up"):
    """``sms`` and ``extra_memory_bytes``: see ``lane_host.LaneReading``."""

    lane: str
    sms: int = 0
    extra_memory_bytes: int = 0


class LaneEnding(msgspec.Struct, tag="ending"):
    """The batch in flight is about to end."""

    batch_id: int


class LaneResult(msgspec.Struct, tag="result"):
    result: BatchResult


class LaneFailure(msgspec.Struct, tag="failure"):
    """The lane's last words before it ends itself: it could not run a batch, or not start. ``config``: what the user
    asked for is to blame. ``no_context``: not even an empty context could be made on the device."""

    reason: str
    config: bool = False
    no_context: bool = False


FromLane = LaneUp | LaneEnding | LaneResult | LaneFailure


# ---- node, which is rank 0 → other ranks


class RankInit(msgspec.Struct, tag="rank_init"):
    """What a rank starts with, as rank 0 has decided it for all."""

    config: EngineConfig
    rank: int
    dtype: str  # of weights
    arrays: PoolSpec  # with the blocks and slots that are for padding
    form: str  # of sharing: a row of device.places.FORMS
    graphs: bool  # whether steps are graphs
    meeting_place: str  # a directory


class StartLane(msgspec.Struct, tag="start_lane"):
    """The lane's first message."""

    lane: str


class PrepareStep(msgspec.Struct, tag="prepare"):
    """``number``: over all lanes, 0 where no other rank is needed. ``part``: of the SMs, None for all of them."""

    number: int
    lane: str
    shape: tuple[int, int]
    part: tuple[int, bool] | None


class RunStep(msgspec.Struct, tag="run_step"):
    number: int
    lane: str
    batch: Batch
    part: tuple[int, bool] | None


class StepDone(msgspec.Struct, tag="step_done"):
    """The lane's earliest step that has not been called done is done on rank 0."""

    number: int
    lane: str


class StopRank(msgspec.Struct, tag="stop_rank"):
    pass


ToRank = RankInit | StartLane | PrepareStep | RunStep | StepDone | StopRank


# ---- other ranks → node


class RankFailure(msgspec.Struct, tag="rank_failure"):
    """A rank's last words. ``config``: the user's settings are to blame."""

    reason: str
    config: bool = False


FromRank = RankFailure


# ---- framing


def pack(message: Any) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


class Channel:
    """Framed messages over a connected stream socket, for a process that waits in a selector or blocks.

    The socket is non-blocking for reads through ``receive`` and buffers what can't be sent at once:
    register for writing while ``wants_write``.
    """

    def __init__(self, sock: socket.socket, decode_type: Any) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._decoder = msgspec.msgpack.Decoder(decode_type)
        self._unread = bytearray()
        self._unsent: collections.deque[memoryview] = collections.deque()

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def wants_write(self) -> bool:
        return bool(self._unsent)

    def send(self, message: Any) -> None:
        """Sends, or queues what the socket does not take now. A closed peer is noticed by ``receive``."""
        self._unsent.append(memoryview(pack(message)))
        self.flush()

    def flush(self) -> None:
        try:
            while self._unsent:
                head = self._unsent[0]
                sent = self.sock.send(head)
                if sent == len(head):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = head[sent:]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()

    def receive(self) -> tuple[list[Any], bool]:
        """All whole messages that have come, and whether the peer has closed. Never blocks."""
        closed = False
        while True:
            try:
                chunk = self.sock.recv(1 << 18)
            except BlockingIOError:
                break
            except OSError:
                closed = True
                break
            if not chunk:
                closed = True
                break
            self._unread += chunk
        messages = []
        start, have = 0, len(self._unread)
        while have - start >= 4:
            (length,) = _LENGTH.unpack_from(self._unread, start)
            if have - start - 4 < length:
                break
            messages.append(self._decoder.decode(memoryview(self._unread)[start + 4 : start + 4 + length]))
            start += 4 + length
        if start:
            del self._unread[:start]
        return messages, closed

    def close(self) -> None:
        self.sock.close()


async def read_message(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    """The next message of a stream, for asyncio users. Raises ``asyncio.IncompleteReadError`` at its end."""
    (length,) = _LENGTH.unpack(await reader.readexactly(4))
    return decoder.decode(await reader.readexactly(length))
