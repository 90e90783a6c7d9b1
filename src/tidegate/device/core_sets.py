"""Dividing a CPU between two lanes: disjoint sets of cores, threads equal to cores.

Threads must equal the share: OpenMP's threads spin while they wait, so two lanes with more threads than cores stop
each other (measured: decode falls from 411 to 19 tokens/s). Shares finer than a core become a duty cycle of prefill:
after a slice it rests, so that over time it takes its share and no more. Decode never rests.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

MOST_SHARES = 6


@dataclass(frozen=True)
class Part:
    """What a lane has of the machine for a batch."""

    cores: tuple[int, ...]
    duty: float  # fraction of the time that it may run, 1 for always


class CoreSets:
    """Decode takes cores from the front of the list, prefill from its back; alone, either takes all."""

    def __init__(self, cores: tuple[int, ...] = ()) -> None:
        self.cores = cores or tuple(sorted(os.sched_getaffinity(0)))

    def part(self, lane: str, share: float) -> Part:
        """``share`` of the machine for lane "P" or "D"; every lane has a core, its own where there are two."""
        total = len(self.cores)
        if share >= 1.0 or total == 1:
            return Part(self.cores, 1.0 if lane == "D" else share)
        decode_share = share if lane == "D" else 1.0 - share
        split = max(1, min(total - 1, round(decode_share * total)))
        if lane == "D":
            return Part(self.cores[:split], 1.0)
        cores = self.cores[split:]
        return Part(cores, min(1.0, share * total / len(cores)))

    def shares(self) -> tuple[float, ...]:
        """Of prefill, that give each lane whole cores, those nearest to a half first; a half of a single core."""
        total = len(self.cores)
        shares = [cores / total for cores in range(1, total)] or [0.5]
        return tuple(sorted(shares, key=lambda share: abs(share - 0.5)))[:MOST_SHARES]


class ProcessPart:
    """Keeps the calling process on the part it was last given."""

    def __init__(self) -> None:
        self._cores: tuple[int, ...] = ()

    def enter(self, part: Part) -> None:
        """Every thread of the process moves to the part's cores, and torch uses as many threads as there are."""
        if part.cores == self._cores:
            return
        for task in Path("/proc/self/task").iterdir():
            try:
                os.sched_setaffinity(int(task.name), part.cores)
            except ProcessLookupError:
                continue  # the thread has just ended
        torch.set_num_threads(len(part.cores))
        self._cores = part.cores
