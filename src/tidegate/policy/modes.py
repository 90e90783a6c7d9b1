"""The table of modes. A mode is a row; nothing else in Tidegate asks which mode it is."""

from dataclasses import dataclass
from functools import cached_property

from tidegate.policy.hybrid import hybrid
from tidegate.policy.one_phase import decode_only, prefill_only
from tidegate.policy.prefill_first import prefill_first
from tidegate.policy.rule import BatchRule


@dataclass(frozen=True)
class LaneSpec:
    """A lane runs batches over a pool. ``phases``: which of P and D its rule may put into a batch. ``fused``: attention
    of a batch's prompts and decodes is to run in one kernel, where the device has one and it is faster than two."""

    name: str
    phases: str
    rule: BatchRule
    fused: bool = False

    @cached_property
    def prefills(self) -> bool:
        return "P" in self.phases

    @cached_property
    def decodes(self) -> bool:
        return "D" in self.phases


@dataclass(frozen=True)
class Mode:
    name: str
    lanes: tuple[LaneSpec, ...]
    handover: str  # how a request goes from prefill to decode: "none" or "block ids"
    gates: tuple[str, ...]  # who may set the shares and the sizes of slices; the first is the default
    origin: str


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("prefill-first", (LaneSpec("D", "PD", prefill_first),), "none", ("static",), "vLLM's original scheduler"),
        Mode("chunked", (LaneSpec("D", "PD", hybrid),), "none", ("static",), "Sarathi-Serve"),
        Mode("pod", (LaneSpec("D", "PD", hybrid, fused=True),), "none", ("static",), "POD-Attention"),
        Mode(
            "semi",
            (LaneSpec("P", "P", prefill_only), LaneSpec("D", "D", decode_only)),
            "block ids",
            ("static", "semi-pd", "drift"),
            "Semi-PD, MuxWise",
        ),
        Mode(
            "auto",
            (LaneSpec("D", "PD", hybrid), LaneSpec("P", "P", prefill_only)),
            "block ids",
            ("auto",),
            "the best of these for each step, by prediction",
        ),
    )
}
