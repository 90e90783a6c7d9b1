"""Which steps to measure on a device, in order of importance: the fewer that there is time for, the coarser the model.

A probe is one batch: decode rows of equal length, a slice of one prompt, or both. A trial is a probe on a place (a
lane and its share), or one on each lane's part at the same time.
"""

import itertools
import math
import random
from collections.abc import Iterator
from typing import NamedTuple

from tidegate.base.specs import PoolSpec
from tidegate.policy.modes import Mode
from tidegate.slo.latency import Work

LONGEST_CONTEXT = 8192  # tokens; attention's time is linear in it beyond
LONGEST_START = 8192


class Probe(NamedTuple):
    rows: int = 0  # decode rows
    context: int = 0  # tokens of each, the one that goes in included
    new: int = 0  # tokens of a slice
    start: int = 0  # its first position

    @property
    def work(self) -> Work:
        return Work(self.new, self.new * (self.start + self.new / 2), self.start, self.rows, self.rows * self.context)


class Alone(NamedTuple):
    """``lane`` runs on ``share`` of the device, the other one rests."""

    lane: str
    share: float
    probe: Probe


class Both(NamedTuple):
    """``share`` is prefill's, decode has the rest."""

    share: float
    prefill: Probe
    decode: Probe


Trial = Alone | Both


class Reach(NamedTuple):
    """What an empty pool and a mode's lanes let one measure."""

    rows: int
    context: int
    decode_blocks: int  # that the rows divide among themselves
    block_size: int
    new: int
    prompt: int  # positions of the slot that slices are in
    least_new: int  # slices are multiples of it
    sizes: tuple[int, ...]  # tokens that steps are padded to; none: they are not
    usual_new: int  # tokens of a slice that takes as long as slices should, at a guess
    shares: tuple[float, ...]  # prefill's, in order of importance; none: the mode does not divide the device
    prefill_lane: str  # that prefills on the whole device
    hybrid: bool  # whether one lane may have both in a step

    @classmethod
    def of(
        cls, mode: Mode, pool: PoolSpec, max_new: int, least_new: int, usual_new: int, shares: tuple[float, ...],
        sizes: tuple[int, ...] = (),
    ) -> "Reach":  # fmt: skip
        """``shares``: that the device can be divided by. The last slot is for slices, the others are for rows."""
        blocks_of_prompt = -(-min(pool.max_model_len, LONGEST_START + max_new) // pool.block_size)
        blocks_of_prompt = max(1, min(blocks_of_prompt, pool.num_blocks // 2))
        prompt = min(blocks_of_prompt * pool.block_size, pool.max_model_len)
        decode_blocks = max(1, pool.num_blocks - blocks_of_prompt)
        together = pool.max_num_seqs > 1 and pool.num_blocks > 1
        lanes = {lane.name: lane for lane in mode.lanes}
        fused = "P" in lanes["D"].phases
        return cls(
            rows=max(1, min(pool.max_num_seqs - 1, decode_blocks)),
            context=min(pool.max_model_len, LONGEST_CONTEXT),
            decode_blocks=decode_blocks,
            block_size=pool.block_size,
            new=min(max_new, prompt),
            prompt=prompt,
            least_new=min(least_new, prompt),
            sizes=tuple(size for size in sizes if size <= min(max_new, prompt)),
            usual_new=usual_new,
            shares=shares if len(lanes) > 1 and together else (),
            prefill_lane="D" if fused else "P",
            hybrid=fused and together,
        )

    def cut(self, rows: int = 0, context: int = 0, new: int = 0, start: int = 0) -> Probe:
        """The probe nearest to this within reach."""
        rows = min(rows, self.rows)
        if new:
            new = max(self.least_new, min(new, self.new) // self.least_new * self.least_new)
        if rows:
            context = max(1, min(context, self.context, self.decode_blocks // rows * self.block_size))
        return Probe(rows, context, new, min(start, self.prompt - new))


SHORT, MIDDLE, LONG = 128, 1024, 4096  # contexts
CROWD = 16  # decode rows


def least(reach: Reach) -> list[Trial]:
    """With fewer a model would mean nothing: 11 steps on the whole device, 9 on its parts at the first share."""
    parts = _part(reach, reach.shares[0]) if reach.shares else ()
    return list(dict.fromkeys((*_whole(reach), *parts)))


def more(reach: Reach, fine: bool = False) -> list[Trial]:
    """What there is beyond the least; ``fine``: for when there is time. In the end, of the whole device and of its
    parts in turns, so that wherever time is over much is known of both."""
    parts = [trial for share in reach.shares for trial in _part(reach, share)]
    turns = itertools.zip_longest(
        _whole_in_detail(reach, fine), (_part_in_detail(reach, share, fine) for share in reach.shares), fillvalue=()
    )
    details = [trial for whole, part in turns for trial in (*whole, *part)]
    trials = dict.fromkeys((*_ladders(reach, fine), *parts, *_as_many_as_there_may_be(reach), *details))
    known = set(least(reach))
    return [trial for trial in trials if trial not in known]


def _whole(reach: Reach) -> Iterator[Trial]:
    """4 decode steps, 5 slices, and 2 hybrid ones."""
    usual = reach.usual_new
    for rows, context in ((1, SHORT), (CROWD, SHORT), (reach.rows, SHORT), (CROWD, MIDDLE)):
        yield Alone("D", 1.0, reach.cut(rows, context))
    for new, start in ((reach.least_new, 0), (usual // 2, 0), (usual, 0), *_late_slices(reach)):
        yield Alone(reach.prefill_lane, 1.0, reach.cut(new=new, start=start))
    if reach.hybrid:
        yield Alone("D", 1.0, reach.cut(CROWD, SHORT, usual // 2))
        yield Alone("D", 1.0, reach.cut(CROWD, MIDDLE, reach.least_new, MIDDLE))


def _late_slices(reach: Reach) -> tuple[tuple[int, int], ...]:
    """A long and a short one, so that reading earlier tokens' KV and computing with it can be told apart."""
    return (reach.usual_new, MIDDLE), (reach.usual_new // 8, LONG)


def _part(reach: Reach, share: float) -> Iterator[Trial]:
    """4 slices, 4 decode steps, and a slice and a decode step beside each other: what a division needs."""
    usual = reach.usual_new
    for new, start in ((reach.least_new, 0), (usual, 0), *_late_slices(reach)):
        yield Alone("P", share, reach.cut(new=new, start=start))
    for rows, context in ((1, SHORT), (CROWD, SHORT), (reach.rows, SHORT), (CROWD, MIDDLE)):
        yield Alone("D", 1.0 - share, reach.cut(rows, context))
    yield Both(share, reach.cut(new=usual), reach.cut(CROWD, SHORT))


def _ladders(reach: Reach, fine: bool) -> Iterator[Trial]:
    for new in reach.sizes or _ladder(2 * reach.least_new, reach.new, fine):
        yield Alone(reach.prefill_lane, 1.0, reach.cut(new=new))
    for rows in _ladder(2, reach.rows, fine):
        yield Alone("D", 1.0, reach.cut(rows, SHORT))


def _whole_in_detail(reach: Reach, fine: bool) -> Iterator[list[Trial]]:
    """Decode, then for each size of slice, a part of the usual one: slices and hybrid steps."""
    if fine:
        all_rows = [1, 4, 8, CROWD, 2 * CROWD, 4 * CROWD, 8 * CROWD]
        contexts = starts = [MIDDLE // 2, MIDDLE, 2 * MIDDLE, LONG, 2 * LONG]
        parts = [0.125, 0.25, 0.5, 1.0, 2.0]
    else:
        all_rows = [4, CROWD, 4 * CROWD]
        contexts, starts = [MIDDLE, LONG], [MIDDLE, LONG, 2 * LONG]
        parts = [0.125, 0.25, 0.5, 1.0]
    yield [Alone("D", 1.0, reach.cut(rows, context)) for rows in all_rows for context in contexts]
    for part in parts:
        new = int(reach.usual_new * part)
        slices: list[Trial] = [Alone(reach.prefill_lane, 1.0, reach.cut(new=new, start=start)) for start in starts]
        hybrid: list[Trial] = [
            Alone("D", 1.0, reach.cut(rows, context, new, start))
            for rows in all_rows
            for context, start in ((SHORT, 0), (MIDDLE, MIDDLE), (MIDDLE, LONG))
        ]
        yield [*slices, *hybrid] if reach.hybrid else slices


def _as_many_as_there_may_be(reach: Reach) -> Iterator[Trial]:
    """Decode rows, with longer contexts than in the ladder, and beside slices."""
    for context in (MIDDLE, LONG):
        yield Alone("D", 1.0, reach.cut(reach.rows, context))
    if reach.hybrid:
        for new in (reach.usual_new // 4, reach.usual_new):
            for context, start in ((SHORT, 0), (MIDDLE, MIDDLE)):
                yield Alone("D", 1.0, reach.cut(reach.rows, context, new, start))


def _part_in_detail(reach: Reach, share: float, fine: bool) -> Iterator[Trial]:
    usual = reach.usual_new
    for new in _ladder(2 * reach.least_new, min(reach.new, 2 * usual), fine):
        yield Alone("P", share, reach.cut(new=new))
    for rows in (4, 4 * CROWD) if not fine else _ladder(2, reach.rows, fine):
        yield Alone("D", 1.0 - share, reach.cut(rows, SHORT))
    for rows in (4, 4 * CROWD):
        yield Alone("D", 1.0 - share, reach.cut(rows, MIDDLE))
    for new, rows, context in ((usual, CROWD, LONG), (usual // 2, 4 * CROWD, SHORT), (usual, 4, SHORT)):
        yield Both(share, reach.cut(new=new, start=MIDDLE), reach.cut(rows, context))


def _ladder(low: int, high: int, fine: bool) -> Iterator[int]:
    """Doubles from ``low``, with a step in between where it is fine; ends with ``high``."""
    step = low
    while step < high:
        yield step
        if fine and step + step // 2 < high:
            yield step + step // 2
        step *= 2
    yield high


def unseen(reach: Reach, seed: int) -> Iterator[Trial]:
    """Without end: trials of random sizes, each order of magnitude as likely, to judge a model by."""
    rng = random.Random(seed)

    def size(low: int, high: int) -> int:
        return round(math.exp(rng.uniform(math.log(max(1, low)), math.log(max(1, low, high)))))

    def decode() -> Probe:
        return reach.cut(size(1, reach.rows), size(SHORT // 2, reach.context))

    def prefill() -> Probe:
        quanta = size(1, -(-2 * reach.usual_new // reach.least_new))
        return reach.cut(new=quanta * reach.least_new, start=rng.choice((0, size(1, LONGEST_START))))

    def hybrid() -> Probe:
        rows, piece = decode(), prefill()
        return Probe(rows.rows, rows.context, piece.new, piece.start)

    while True:
        yield Alone("D", 1.0, decode())
        yield Alone(reach.prefill_lane, 1.0, prefill())
        if reach.hybrid:
            yield Alone("D", 1.0, hybrid())
        if reach.shares:
            yield Both(rng.choice(reach.shares), prefill(), decode())
