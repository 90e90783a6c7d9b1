"""Prefill and decode in one engine, on all of its devices: a mode of the engine, with its chunk or its share.

    prefill-first   prompts before tokens (vLLM's original scheduler)
    chunked C       every step all decodes, and prompt tokens up to C (Sarathi-Serve, OSDI 2024)
    semi S          side by side, prefill on the share S of the compute (Semi-PD, arXiv 2504.19867)
    semi by RULE    side by side, on shares that Semi-PD's or Drift's rule sets (the gates of mode semi)
    auto            the best of these for each step, by prediction

With several GPUs an engine is spread over ``tp`` of them, and copies of it share the requests: each gets arrivals as
from a source of its own, which is a little harder than a router that looks at their load.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from tidegate.core.config import CoreConfig
from tidegate.plan import bounds
from tidegate.plan.bounds import Rates
from tidegate.plan.demand import Arrival
from tidegate.plan.engine import simulate_engine
from tidegate.plan.setting import GPU_SLICE_S, MAX_TOKENS, WHOLE_CHUNK_S, Setting
from tidegate.policy.modes import MODES
from tidegate.slo.gates import predicts
from tidegate.slo.goodput import Latency

CHUNKS = (128, 256, 512, 1024, 2048)
AHEAD = 1.1  # a gate may be so much better than the best of what it chooses from, by choosing again and again


class Way(NamedTuple):
    """Of running an engine. ``chunk``: tokens of a batch at most. ``gate``: that sets shares, if not the mode's own."""

    mode: str
    rates: Rates
    chunk: int = MAX_TOKENS
    share: float | None = None
    gate: str | None = None

    @property
    def family(self) -> str:
        return self.mode + (f" by {self.gate}" if self.gate is not None else "")

    @property
    def name(self) -> str:
        chunk = f" {self.chunk}" if self.chunk < MAX_TOKENS else ""
        return self.family + chunk + (f" {self.share:.0%}" if self.share is not None else "")

    @property
    def adapts(self) -> bool:
        """Whether its gate decides from predictions."""
        return predicts(self.gate or MODES[self.mode].gates[0])


class Colocated:
    """``Candidate``."""

    instances = 1

    def __init__(self, setting: Setting, tp: int, way: Way) -> None:
        self._setting, self._tp, self._way = setting, tp, way
        self.unit_gpus = tp
        self.copies = setting.gpus // tp
        self.kv_tokens = setting.memory(tp).kv_tokens
        self.ceiling, self.capacity = way.rates
        self.runnable = tp == 1
        self.family = way.family
        self.adapts = way.adapts

    @property
    def name(self) -> str:
        return self._way.name + (f" · tp {self._tp}" if self._tp > 1 else "")

    @cached_property
    def _config(self) -> CoreConfig:
        way = self._way
        share = 0.5 if way.share is None else way.share
        return self._setting.core_config(self._tp, way.mode, way.chunk, share, way.gate)

    def simulate(self, arrivals: Sequence[Arrival], seed: int) -> list[Latency | None]:
        return simulate_engine(self._config, self._setting.latency(self._tp), arrivals, seed)

    def commands(self) -> list[str]:
        return [self._setting.command(self._tp, self._way.mode, *self._flags())]

    def _flags(self) -> list[str]:
        flags = []
        if self._way.chunk < MAX_TOKENS:
            flags += [f"--max-num-batched-tokens {self._way.chunk}", f"--slice-ms {WHOLE_CHUNK_S * 1e3:.0f}"]
        elif self._setting.slice_s(self._tp) > GPU_SLICE_S and self._setting.device.is_gpu:
            flags.append(f"--slice-ms {self._setting.slice_s(self._tp) * 1e3:.0f}")
        if self._way.share is not None:
            flags.append(f"--prefill-share {self._way.share:.2f}")
        if self._way.gate is not None:
            flags.append(f"--gate {self._way.gate}")
        return flags


def colocated(setting: Setting) -> list[Colocated]:
    """Every way, chunk, share and rule, at every degree of tensor parallelism that fits."""
    return [Colocated(setting, tp, way) for tp in setting.degrees for way in ways(setting, tp)]


def ways(setting: Setting, tp: int) -> list[Way]:
    divisions = setting.latency(tp).divisions
    fused = [
        Way("prefill-first", bounds.prefill_first(setting, tp)),
        *(Way("chunked", bounds.chunked(setting, tp, chunk), chunk) for chunk in CHUNKS),
    ]
    semi = [Way("semi", bounds.semi(setting, tp, division), share=division.share) for division in divisions]
    rules = [gate for gate in MODES["semi"].gates if predicts(gate)] if semi else []
    by_rule = [Way("semi", _choosing(semi), gate=gate) for gate in rules]
    return [*fused, *semi, *by_rule, Way("auto", _choosing([*fused, *semi]))]


def _choosing(ways: Sequence[Way]) -> Rates:
    """Of a gate that chooses among them."""
    ceilings, capacities = zip(*(way.rates for way in ways), strict=True)
    return Rates(AHEAD * max(ceilings), AHEAD * max(capacities))
