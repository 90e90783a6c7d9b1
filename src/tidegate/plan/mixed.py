"""Some devices split, the others not: xPyDzS, in which S instances serve whole requests (by any way of one engine).

A router sends each part as much as it can take; so what a mix attains is what its parts attain, and no simulation of
its own is needed. It wins where the GPUs can't be divided as a split needs them: a phase that would want 1.6 instances
gets 1 or 2, and what is left over is lost to a pure split but not here.
"""

from tidegate.plan.candidate import Candidate
from tidegate.plan.rate import Found, Probe


class Mixed:
    """One ``split`` unit and ``z`` units of ``single``."""

    family = "split and whole"
    copies = 1
    runnable = False

    def __init__(self, split: Candidate, single: Candidate, z: int) -> None:
        self._split, self._single, self._z = split, single, z
        self.name = f"{split.name} + {z} × {single.name}"
        self.unit_gpus = split.unit_gpus + z * single.unit_gpus
        self.kv_tokens = split.kv_tokens + z * single.kv_tokens
        self.ceiling = split.ceiling + z * single.ceiling

    def commands(self) -> list[str]:
        times = f"   # × {self._z}" if self._z > 1 else ""
        return [*self._split.commands(), *(command + times for command in self._single.commands())]

    def found(self, split: Found, single: Found) -> Found:
        """From what was found for one unit of either. Its one probe has requests of both, in their proportion."""
        rate = split.rate + self._z * single.rate
        latencies, attained = [], 0.0
        for part, share in ((split, split.rate / rate), (single, self._z * single.rate / rate)):
            latencies += part.best.latencies[: int(share * len(part.best.latencies))]
            attained += share * part.best.attained
        low, high = split.low + self._z * single.low, split.high + self._z * single.high
        return Found(rate, low, high, [Probe(rate, attained, latencies)])
