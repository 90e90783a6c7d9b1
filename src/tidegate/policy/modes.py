"""The table of modes. A mode is a row; nothing else in Tidegate asks which mode it is."""

from dataclasses import dataclass

from tidegate.policy.hybrid import hybrid
from tidegate.policy.one_phase import decode_only, prefill_only
from tidegate.policy.prefill_first import prefill_first
from tidegate.policy.rule import BatchRule


@dataclass(frozen=True)
class LaneSpec:
    """A lane runs batches over a pool. ``phases`` is for people and metrics; the rule decides."""

    name: str
    phases: str
    rule: BatchRule


@dataclass(frozen=True)
class Mode:
    name: str
    lanes: tuple[LaneSpec, ...]
    handover: str  # how a request goes from prefill to decode: "none" or "block ids"
    origin: str


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("prefill-first", (LaneSpec("D", "PD", prefill_first),), "none", "vLLM's original scheduler"),
        Mode("chunked", (LaneSpec("D", "PD", hybrid),), "none", "Sarathi-Serve"),
        Mode(
            "semi",
            (LaneSpec("D", "D", decode_only), LaneSpec("P", "P", prefill_only)),
            "block ids",
            "Semi-PD, MuxWise",
        ),
    )
}
