"""How long a batch takes: the latency model that policies decide with and that the simulator runs with.

A batch is described by five sums (``Work``). Its time on a place (the whole device, or a part of it) is

    dense(new + rows)  +  pair_s · pairs  +  reused_s · reused  +  context_s · context  +  row_s · rows
    (+ hybrid_s, where a batch has both prompt tokens and decode rows)

``dense`` is the time of everything that does not look at other tokens: piecewise linear, since matrix products are
bound by reading the weights while they have few rows, by arithmetic when they have many, and are quantised in between;
or a staircase, where batches are padded to fixed sizes (``Padding``). The other terms are attention: the arithmetic of
prompt tokens (Σ new² and Σ new · reused), and the KV that slices and decode rows read; each decode row has a cost of
its own beside that, and attention of both kinds in one batch is two kernels a layer. While two lanes run, each is
slowed down by the other, by a factor of its own in each division.
"""

import bisect
import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidegate.base.batch import Batch


class Work(NamedTuple):
    """What a batch asks of a device; sums over its rows, in tokens."""

    new: int = 0  # prompt tokens
    pairs: float = 0.0  # Σ new · (start + new / 2): keys that prompt tokens look at
    reused: int = 0  # Σ start: earlier positions whose KV slices read
    rows: int = 0  # decode rows
    context: int = 0  # Σ of decode rows' lengths

    @classmethod
    def of(cls, batch: Batch) -> "Work":
        new = pairs = reused = 0
        for piece in batch.slices:
            count = len(piece.tokens)
            new += count
            pairs += count * (2 * piece.start + count)
            reused += piece.start
        positions = batch.decode_positions
        return cls(new, pairs / 2, reused, len(positions), sum(positions) + len(positions))

    def and_slice(self, start: int, new: int) -> "Work":
        return Work(self.new + new, self.pairs + new * (start + new / 2), self.reused + start, self.rows, self.context)


class Padding(msgspec.Struct, frozen=True):
    """To what a device pads batches: decode rows to a multiple of ``rows``, or of twice as many where there are more
    than ``FINE`` times ``rows``; then all tokens to the next of ``tokens`` (ascending; empty: no further)."""

    FINE: ClassVar[int] = 8

    tokens: tuple[int, ...] = ()
    rows: int = 1

    def padded_rows(self, rows: int) -> int:
        step = self._step(rows)
        return -(-rows // step) * step

    def held_by(self, padded: int) -> tuple[int, int]:
        """From how many rows to how many are padded to this."""
        return padded - self._step(padded) + 1, padded

    def _step(self, rows: int) -> int:
        return self.rows if self.rows == 1 or rows <= self.FINE * self.rows else 2 * self.rows


class Costs(msgspec.Struct, frozen=True):
    """Of batches on one place. Seconds, and seconds per token."""

    tokens: tuple[int, ...]  # ascending, two or more: where ``dense_s`` is known
    dense_s: tuple[float, ...]
    pair_s: float
    reused_s: float
    context_s: float
    padding: Padding = Padding()
    row_s: float = 0.0
    hybrid_s: float = 0.0  # of a batch with both prompt tokens and decode rows

    def dense(self, tokens: int) -> float:
        """Linear between the known points; constant below them. Above, on along the last two, but a further token never
        takes longer than those of the largest size do on average: what a batch takes in any case is not negative.
        Where all batches are padded, the time of the next known size."""
        knots, values = self.tokens, self.dense_s
        if self.padding.tokens and tokens <= knots[-1]:
            return values[bisect.bisect_left(knots, tokens)]
        i = bisect.bisect_right(knots, tokens)
        if i == 0:
            return values[0]
        if i == len(knots):
            token_s = (values[-1] - values[-2]) / (knots[-1] - knots[-2])
            return values[-1] + (tokens - knots[-1]) * min(token_s, values[-1] / knots[-1])
        low, high = knots[i - 1], knots[i]
        return values[i - 1] + (values[i] - values[i - 1]) * (tokens - low) / (high - low)

    def seconds(self, work: Work) -> float:
        new, pairs, reused, rows, context = work
        attention = self.pair_s * pairs + self.reused_s * reused + self.context_s * context
        attention += self.row_s * rows + (self.hybrid_s if new and rows else 0.0)
        return self.dense(new + self.padding.padded_rows(rows)) + attention

    def in_prompt_tokens(self, decodes: Work, chunk: int) -> float:
        """The prompt tokens, in batches of ``chunk``, that take as long as what these decodes add to a large batch."""
        added = self.context_s * decodes.context + self.row_s * decodes.rows
        return decodes.rows + added * chunk / self.dense(chunk)

    def chunks(self, work: Work, start: int, most: int) -> list[tuple[float, int]]:
        """For each size that batches are padded to: the seconds that ``work`` takes with a slice from ``start`` that
        fills it up, and the slice's tokens, at most ``most``. Ascending; none where batches are not padded."""
        fixed = self.seconds(work._replace(new=1)) - self.dense(1 + self.padding.padded_rows(work.rows))
        fixed += self.reused_s * start
        rows = work.new + self.padding.padded_rows(work.rows)
        chunks = []
        for size, dense_s in zip(self.tokens, self.dense_s, strict=True) if self.padding.tokens else ():
            new = min(size - rows, most)
            if new > 0:
                chunks.append((dense_s + fixed + self.pair_s * new * (start + new / 2), new))
                if new == most:
                    break
        return chunks

    def most_new(self, work: Work, start: int, most: int, seconds: float, quantum: int = 1) -> int:
        """The most prompt tokens of a slice from ``start``, at most ``most``, with which ``work`` still takes at most
        ``seconds``; 0 if there are none. All of ``most``, or a multiple of ``quantum``."""
        fixed = self.pair_s * work.pairs + self.reused_s * (work.reused + start) + self.context_s * work.context
        fixed += self.row_s * work.rows + (self.hybrid_s if work.rows else 0.0)
        done = work.new + self.padding.padded_rows(work.rows)

        def fits(new: int) -> bool:
            return fixed + self.dense(done + new) + self.pair_s * new * (start + new / 2) <= seconds

        if fits(most):
            return most
        low, high = 0, (most - 1) // quantum  # multiples: low fits, what lies above high does not
        while low < high:
            middle = (low + high + 1) // 2
            if fits(middle * quantum):
                low = middle
            else:
                high = middle - 1
        return low * quantum


class Division(msgspec.Struct, frozen=True):
    """Of a device between prefill, which has ``share``, and decode. A slowdown is the factor, 1 or more, by which a
    lane's batches take longer while the other lane runs too."""

    share: float
    prefill: Costs
    decode: Costs
    prefill_slowdown: float
    decode_slowdown: float

    def prefill_rate(self, start: int, most: int, seconds: float, factor: float) -> float:
        """Prompt tokens per second beside decode, in slices from ``start`` of at most ``most`` tokens and ``seconds``,
        each of which takes ``factor`` times as long as the model says."""
        slower = self.prefill_slowdown * factor
        tokens = self.prefill.most_new(Work(), start, most, seconds / slower)
        return tokens / (self.prefill.seconds(Work().and_slice(start, tokens)) * slower)


class LatencyModel(msgspec.Struct, frozen=True):
    whole: Costs
    divisions: tuple[Division, ...] = ()  # ascending shares; none: the device can't be divided

    def division(self, share: float) -> Division:
        """The one nearest to prefill having ``share``."""
        nearest, distance = self.divisions[0], math.inf
        for division in self.divisions:
            if abs(division.share - share) < distance:
                nearest, distance = division, abs(division.share - share)
        return nearest

    def seconds(self, work: Work, lane: str, share: float, beside: bool) -> float:
        """Of a batch of lane "P" or "D" on ``share`` of the device (1.0: all of it), the other one running or not."""
        if share >= 1.0 or not self.divisions:
            return self.whole.seconds(work)
        if lane == "P":
            division = self.division(share)
            return division.prefill.seconds(work) * (division.prefill_slowdown if beside else 1.0)
        division = self.division(1.0 - share)
        return division.decode.seconds(work) * (division.decode_slowdown if beside else 1.0)


def rough(prefill_tokens_per_s: float, shares: Sequence[float] = (0.25, 0.5, 0.75)) -> LatencyModel:
    """A first belief where nothing was measured: batches under 256 tokens take as long as 256, compute grows with the
    share, bandwidth is had in full from half of the device on."""
    base = 256 / prefill_tokens_per_s
    knots, dense = (256, 4096), (base, 16 * base)
    context_s = base / 2**17

    def of_part(share: float, speed: float) -> Costs:
        return Costs(knots, tuple(seconds / share for seconds in dense), 0.0, 0.0, context_s / speed)

    divisions = (
        Division(share, of_part(share, 1.0), of_part(1.0 - share, min(1.0, 2 - 2 * share)), 1.2, 1.2)
        for share in shares
    )
    return LatencyModel(of_part(1.0, 1.0), tuple(divisions))


# ---- fitting


class Sample(msgspec.Struct, frozen=True):
    """One measurement. ``share`` is the lane's own, 1.0 for the whole device."""

    lane: str
    share: float
    beside: bool
    work: Work
    seconds: float


NONE = Padding()
NEAR = 1.2  # knots are kept this factor apart
TOLERANCE = 1e-9
SMALL = 1e-3  # the weight of zero


def fit(samples: Sequence[Sample], padding: Padding = NONE) -> LatencyModel:
    """The model that fits measurements best, in relative error. Divisions come from shares at which both lanes were
    measured alone; raises ValueError if nothing was measured on the whole device."""
    whole = fit_costs([s for s in samples if s.share >= 1.0], padding)
    divisions = []
    for share in sorted({round(s.share, 4) for s in samples if s.lane == "P" and s.share < 1.0}):
        of_p = [s for s in samples if s.lane == "P" and abs(s.share - share) < 1e-3]
        of_d = [s for s in samples if s.lane == "D" and s.share < 1.0 and abs(1.0 - s.share - share) < 1e-3]
        alone_p, alone_d = ([s for s in lane if not s.beside] for lane in (of_p, of_d))
        if not alone_p or not alone_d:
            continue
        prefill, decode = fit_costs(alone_p, padding), fit_costs(alone_d, padding)
        slowdowns = (_slowdown(prefill, of_p), _slowdown(decode, of_d))
        divisions.append(Division(share, prefill, decode, *slowdowns))
    return LatencyModel(whole, tuple(divisions))


def fit_costs(samples: Sequence[Sample], padding: Padding = NONE) -> Costs:
    if not samples:
        raise ValueError("nothing was measured on this place")
    sizes = [s.work.new + padding.padded_rows(s.work.rows) for s in samples]
    if padding.tokens:
        sizes = [padding.tokens[bisect.bisect_left(padding.tokens, size)] for size in sizes]
        knots = sorted(set(sizes))
    else:
        knots = _thinned(sorted(set(sizes)))
    if len(knots) == 1:
        knots.append(2 * knots[0])  # two, as ``Costs.dense`` wants
    columns = np.zeros((len(samples), len(knots) + 5))
    for row, size, sample in zip(columns, sizes, samples, strict=True):
        work = sample.work
        row[: len(knots)] = _steps(knots, size)
        row[len(knots) :] = work.pairs, work.reused, work.context, work.rows, bool(work.new and work.rows)
        row /= sample.seconds
    values = _least_squares(columns, np.ones(len(samples)))
    dense = np.cumsum(values[: len(knots)])
    if padding.tokens:  # the sizes in between were not measured: on the line between those that were
        between = [size for size in padding.tokens if knots[0] < size < knots[-1]]
        measured, knots = knots, sorted({*knots, *between})
        dense = np.interp(knots, measured, dense)
    pair_s, reused_s, context_s, row_s, hybrid_s = values[-5:].tolist()
    return Costs(tuple(knots), tuple(dense.tolist()), pair_s, reused_s, context_s, padding, row_s, hybrid_s)


def _slowdown(costs: Costs, samples: Sequence[Sample]) -> float:
    ratios = [s.seconds / costs.seconds(s.work) for s in samples if s.beside]
    return max(1.0, float(np.median(ratios))) if ratios else 1.0


def _thinned(counts: list[int]) -> list[int]:
    """Some of them, the first and the last included, so far apart that what lies between two of them is not noise."""
    kept = counts[:1]
    for count in counts[1:]:
        if count >= kept[-1] * NEAR:
            kept.append(count)
    if counts[-1] > kept[-1]:
        if len(kept) > 1:
            kept.pop()  # the largest of all instead of its neighbour
        kept.append(counts[-1])
    return kept


def _steps(knots: list[int], tokens: int) -> NDArray[np.float64]:
    """The weights in ``Costs.dense(tokens)`` of the first knot's value and of what each next knot adds to it. None of
    these is negative, since more tokens never take less time."""
    weights = np.zeros(len(knots))
    i = min(max(bisect.bisect_right(knots, tokens), 1), len(knots) - 1)
    weights[:i] = 1.0
    weights[i] = (max(tokens, knots[0]) - knots[i - 1]) / (knots[i] - knots[i - 1])
    return weights


def _least_squares(columns: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares with nothing below zero (Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23); of
    several answers that are as good, the one that is nearest to zero."""
    scale = np.abs(columns).max(axis=0)
    scale[scale == 0] = 1.0
    columns = np.vstack([columns / scale, SMALL * np.eye(len(scale))])
    wanted = np.concatenate([wanted, np.zeros(len(scale))])

    def solved(used: NDArray[np.bool_]) -> NDArray[np.float64]:
        values = np.zeros(columns.shape[1])
        values[used] = np.linalg.lstsq(columns[:, used], wanted, rcond=None)[0]
        return values

    values = np.zeros(columns.shape[1])
    used = np.zeros(columns.shape[1], dtype=bool)
    useless = used.copy()  # columns that would help, but for rounding
    while True:
        gains = np.where(used | useless, 0.0, columns.T @ (wanted - columns @ values))
        best = int(gains.argmax())
        if gains[best] <= TOLERANCE * len(wanted):
            return values / scale  # type: ignore[no-any-return]
        used[best] = True
        trial = solved(used)
        if trial[best] <= TOLERANCE:
            used[best], useless[best] = False, True
            continue
        useless[:] = False
        while (below := used & (trial <= 0.0)).any():
            # As far as the first of these allows, and on without it.
            values += (trial - values) * (values[below] / (values[below] - trial[below])).min()
            used &= values > TOLERANCE
            values[~used] = 0.0
            trial = solved(used)
        values = trial


def relative_errors(model: LatencyModel, samples: Sequence[Sample]) -> list[float]:
    return [abs(model.seconds(s.work, s.lane, s.share, s.beside) / s.seconds - 1.0) for s in samples]
