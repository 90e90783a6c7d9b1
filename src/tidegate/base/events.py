"""The core's whole interface: events in, actions out. ``Core.on_event(event, now) -> list[Action]``.

Tagged msgpack records, so that they can cross processes, be recorded, and be replayed.
"""

import msgspec

from tidegate.base.batch import Batch, BatchResult
from tidegate.base.request import Output, RequestSpec


class Arrived(msgspec.Struct, frozen=True, tag="arrived"):
    request: RequestSpec


class Aborted(msgspec.Struct, frozen=True, tag="aborted"):
    """The client left, or found a stop string. Unknown and ended ids are ignored."""

    request_id: str


class BatchDone(msgspec.Struct, frozen=True, tag="batch_done"):
    lane: str
    result: BatchResult


class BatchEnding(msgspec.Struct, frozen=True, tag="batch_ending"):
    """The lane's only batch in flight is about to end: the next one may be bound now, so that no gap shows."""

    lane: str
    batch_id: int


class LaneReady(msgspec.Struct, frozen=True, tag="lane_ready"):
    """A lane started, or started again: it holds nothing from before."""

    lane: str


class LaneLost(msgspec.Struct, frozen=True, tag="lane_lost"):
    """A lane ended, by itself or killed. Whatever it had in flight did not happen."""

    lane: str
    reason: str


class LaneGone(msgspec.Struct, frozen=True, tag="lane_gone"):
    """A lane can't be started again: requests that need it fail with ``reason``. ``config``: what the user asked for is
    to blame, and ``reason`` says what to change."""

    lane: str
    reason: str
    config: bool = False


class ModeSet(msgspec.Struct, frozen=True, tag="mode_set"):
    mode: str


class SharesSet(msgspec.Struct, frozen=True, tag="shares_set"):
    """``shares[lane]`` of the compute while both lanes run; each in (0, 1), together 1."""

    shares: dict[str, float]


class Tuned(msgspec.Struct, frozen=True, tag="tuned", omit_defaults=True):
    """Settings that change while serving; None leaves one as it is. From the next batch on they are in force."""

    max_num_batched_tokens: int | None = None
    slice_ms: float | None = None
    order: str | None = None
    gate: str | None = None
    ttft_s: float | None = None  # of the SLO
    tpot_s: float | None = None
    slo_metric: str | None = None


class CacheReset(msgspec.Struct, frozen=True, tag="cache_reset"):
    """Forget every cached prefix that no request is using."""


class Tick(msgspec.Struct, frozen=True, tag="tick"):
    """Time passed; nothing else happened."""


Lanewise = BatchDone | BatchEnding | LaneReady | LaneLost | LaneGone
Event = Arrived | Aborted | Lanewise | ModeSet | SharesSet | Tuned | CacheReset | Tick


class Launch(msgspec.Struct, frozen=True, tag="launch"):
    lane: str
    batch: Batch


class Emit(msgspec.Struct, frozen=True, tag="emit"):
    outputs: list[Output]


class Resize(msgspec.Struct, frozen=True, tag="resize"):
    """The division of compute changed; each launch from now on carries the share it runs on."""

    shares: dict[str, float]


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Start this lane (a mode needs it); ``LaneReady`` answers."""

    lane: str


Action = Launch | Emit | Resize | Wake
