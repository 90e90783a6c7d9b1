"""Semi-PD's rule (arXiv 2504.19867, section 5): from one window of finished requests to the next, compare what was
observed with the SLO; after a violation move to the nearest share that is predicted to meet it.

    observed   the 90th percentile of TTFT and of the mean TPOT, or the 99th of all gaps where the SLO is on gaps
    predicted  what was observed, times the model's scale from the share in force to another. Only the scale is
               predicted, not the latency: whatever the model is wrong about on all shares alike cancels out
    of TPOT    the time of the window's mean step, there and here: beside prefill for the part of the time that prefill
               takes there, alone for the rest
    of TTFT    waiting and prefill, as of a queue with one server (M/M/1). Batches take s times as long there as here;
               if prefill is busy for the part r of the time, the time from arrival to first token grows by

                   s · (1 - r) / (1 - r · s)        and without bound from r · s = 1 on

Hysteresis: decode gets more at once. It gets less slowly: only after first tokens have been late for ``PATIENCE``
windows on end, a number that is doubled each time that such a move had to be taken back, and halved by each window that
met the SLO. Without a violation nothing moves.

What counts are requests that came (or, for TPOT, whose first token came) under the share in force. Prompts that have
become late and wait count as well, as ``LATE`` times the SLO: an order that serves them last would else hide them.
"""

import math

from tidegate.slo.belief import Belief
from tidegate.slo.divided_gate import DividedGate
from tidegate.slo.gate import Allowance, Ended, Limits, Load, Observation
from tidegate.slo.goodput import Metric, Slo, percentile
from tidegate.slo.latency import Division, Work


class Batches:
    """The mean of a lane's batches in a window."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self._sums = Work()

    def add(self, seen: Observation) -> None:
        self.count += 1
        self.seconds += seen.seconds
        sums, work = self._sums, seen.work
        self._sums = Work(
            sums.new + work.new,
            sums.pairs + work.pairs,
            sums.reused + work.reused,
            sums.rows + work.rows,
            sums.context + work.context,
        )

    @property
    def work(self) -> Work:
        new, pairs, reused, rows, context = self._sums
        n = max(1, self.count)
        return Work(new // n, pairs / n, reused // n, rows // n, context // n)


class Window:
    def __init__(self, start_s: float, late: int) -> None:
        self.start_s = start_s
        self.late = late  # prompts that waited and could not be in time any more, at its beginning
        self.ttfts_s: list[float] = []
        self.paces_s: list[float] = []  # what the SLO's metric is on: mean TPOTs, or gaps
        self.prefill, self.decode = Batches(), Batches()


class SemiPdGate(DividedGate):
    name = "semi-pd"
    WINDOW_SECONDS = 2.0
    LEAST = 12  # of first tokens, and of paces, in a window
    TTFT_TAIL, TPOT_TAIL, GAP_TAIL = 0.9, 0.9, 0.99
    PATIENCE = 2, 16  # windows, at least and at most
    LATE = 2.0
    MARGIN = 0.97  # of the SLO, within which a share must be predicted to be
    FULL = 0.95  # the busiest that prefill is taken to have been: a queue can't be predicted from a full server

    def __init__(self, limits: Limits, slo: Slo, belief: Belief, share: float) -> None:
        super().__init__(limits, slo, belief, share)
        self._moved_s = -math.inf
        self._late_windows = 0  # on end
        self._patience, self._most_patience = self.PATIENCE
        self._gave = False  # whether the last move gave decode less
        self._window: Window | None = None  # from the first event on
        self._late = 0  # prompts that wait and can't be in time any more

    # ---- what is observed

    def allow(self, load: Load) -> Allowance:
        self._late = load.late
        return super().allow(load)

    def observe(self, seen: Observation) -> None:
        if self._window is None:
            return
        if seen.lane == "P":
            self._window.prefill.add(seen)
            return
        self._window.decode.add(seen)
        if self.slo.metric is Metric.GAP:
            self._window.paces_s.append(seen.seconds)

    def first_token(self, ttft_s: float, now: float) -> None:
        if self._window is None:
            self._window = Window(now, self._late)
        if now - ttft_s >= self._moved_s:
            self._window.ttfts_s.append(ttft_s)
        self._judge(self._window, now)

    def ended(self, request: Ended, now: float) -> None:
        of_mean = self.slo.metric is Metric.TPOT and request.tpot_s > 0
        if self._window is not None and of_mean and request.first_s >= self._moved_s:
            self._window.paces_s.append(request.tpot_s)

    # ---- what follows from it

    def _judge(self, window: Window, now: float) -> None:
        enough = min(len(window.ttfts_s), len(window.paces_s)) >= self.LEAST
        if not enough or now - window.start_s < self.WINDOW_SECONDS:
            return
        tail = self.GAP_TAIL if self.slo.metric is Metric.GAP else self.TPOT_TAIL
        newly_late = [self.LATE * self.slo.ttft_s] * (self._late - window.late)
        ttft_s = percentile(window.ttfts_s + newly_late, self.TTFT_TAIL)
        pace_s = percentile(window.paces_s, tail)
        late, slow = ttft_s > self.slo.ttft_s, pace_s > self.slo.tpot_s
        self._late_windows = self._late_windows + 1 if late else 0
        if late or slow:
            self._answer(self._nearest(window, ttft_s, pace_s, now), now)
        else:
            self._patience = max(self.PATIENCE[0], self._patience // 2)
        self._window = Window(now, self._late)

    def _answer(self, wanted: Division, now: float) -> None:
        gives = wanted.share > self.division.share
        if wanted is self.division or (gives and self._late_windows < self._patience):
            return
        if self._gave and not gives:
            self._patience = min(2 * self._patience, self._most_patience)
        self._move(wanted)
        self._gave, self._moved_s, self._late_windows = gives, now, 0

    def _nearest(self, window: Window, ttft_s: float, pace_s: float, now: float) -> Division:
        """The nearest share that meets both. If there is none: the most for prefill that meets TPOT, since late tokens
        cost every request its SLO and late prefills only some; or the most for decode."""
        here, slo = self.division, self.slo
        busy = min(window.prefill.seconds / (now - window.start_s), self.FULL)
        in_pace, in_time = [], []
        for there in self.model.divisions:
            margin = 1.0 if there is here else self.MARGIN
            longer = self._prefill_scale(window, there)
            if pace_s * self._decode_scale(window, there, busy, longer) > slo.tpot_s * margin:
                continue
            in_pace.append(there)
            if busy * longer < 1 and ttft_s * longer * (1 - busy) / (1 - busy * longer) <= slo.ttft_s * margin:
                in_time.append(there)
        if in_time:
            return min(in_time, key=lambda there: abs(there.share - here.share))
        return in_pace[-1] if in_pace else self.model.divisions[0]

    def _prefill_scale(self, window: Window, there: Division) -> float:
        work = window.prefill.work
        return (there.prefill.seconds(work) * there.prefill_slowdown) / (
            self.division.prefill.seconds(work) * self.division.prefill_slowdown
        )

    def _decode_scale(self, window: Window, there: Division, busy: float, longer: float) -> float:
        work = window.decode.work
        alone = self.model.whole.seconds(work)
        if self.slo.metric is Metric.GAP:
            busy = 1.0  # the longest steps are those beside prefill

        def step_s(division: Division, busy: float) -> float:
            return busy * division.decode.seconds(work) * division.decode_slowdown + (1 - busy) * alone

        return step_s(there, min(1.0, busy * longer)) / step_s(self.division, busy)
