"""A latency model from measured steps: right where the truth is known, in time, and of enough."""

import itertools

import pytest
from predicted_lanes import PredictedLanes

from tidegate.base.errors import ConfigError, TidegateError
from tidegate.base.events import LaneGone, LaneLost
from tidegate.base.specs import PoolSpec
from tidegate.node.calibrate import Calibration, sound
from tidegate.node.measure import HARD_TOKENS, Measure
from tidegate.node.probes import Alone, Reach, least, more, unseen
from tidegate.policy.modes import MODES
from tidegate.slo.latency import Costs, Division, LatencyModel, Padding, Sample, Work

SLICE_SECONDS = 0.03
POOL = PoolSpec(num_blocks=20_000, block_size=16, max_num_seqs=128, max_model_len=8192)
SHARES = (0.5, 0.75)


def costs(slower: float) -> Costs:
    """Of a device that is bound by memory up to 200 tokens and by arithmetic above."""
    dense = (0.005 * slower, 0.006 * slower, 0.055 * slower)
    return Costs((1, 200, 2048), dense, 2e-9 * slower, 1e-8 * slower, 3e-8 * slower)


TRUTH = LatencyModel(
    costs(1.0), tuple(Division(s, costs(1 / s), costs(1 / (1 - s) ** 0.5), 1.15, 1.3) for s in sorted(SHARES))
)


def reach_of(mode="auto", pool=POOL, shares=SHARES, sizes=()):
    return Reach.of(MODES[mode], pool, max_new=2048, least_new=64, usual_new=900, shares=shares, sizes=sizes)


@pytest.fixture
def calibrated():
    """Runs a calibration on lanes whose steps take as long as ``TRUTH`` says."""
    opened = []

    def run(seconds, mode="auto", pool=POOL, noise=0.0, fine=False, truth=TRUTH, lanes=None, settling=0.0):
        padding = truth.whole.padding
        lanes = lanes or PredictedLanes(truth, noise)
        for lane in MODES[mode].lanes:
            lanes.start(lane.name)
        reach = reach_of(mode, pool, sizes=padding.tokens)
        measure = Measure(lanes, pool, reach, 1000, settling, lambda: lanes.now)
        opened.append(measure)
        measure.wait_for({lane.name for lane in MODES[mode].lanes})
        calibration = Calibration(measure, lambda: lanes.now, seconds, SLICE_SECONDS, padding, lambda fraction: None)
        return lanes, calibration, calibration.run(reach, fine)

    yield run
    for measure in opened:
        measure.close()


def test_the_model_of_a_device_whose_costs_are_known_is_right_for_steps_that_it_has_not_seen(calibrated):
    _, _, measured = calibrated(60.0)
    assert measured.unseen >= 20
    assert measured.error.p50 < 0.01 and measured.error.p95 < 0.12  # the knee lies between two knots
    assert [division.share for division in measured.model.divisions] == sorted(SHARES)
    for division, true in zip(measured.model.divisions, TRUTH.divisions, strict=True):
        assert division.prefill_slowdown == pytest.approx(true.prefill_slowdown, rel=0.05)
        assert division.decode_slowdown == pytest.approx(true.decode_slowdown, rel=0.05)


class Resting(PredictedLanes):
    """Of a device that rests before the first step of each kind, as while a graph is captured, and that is faster in
    the first of its hard work, as before a power limit makes itself felt."""

    REST_SECONDS, FAST_SECONDS, FASTER = 0.05, 0.08, 0.85

    def __init__(self, truth):
        super().__init__(self)
        self._truth, self._seen, self._hard_since, self._hard_until = truth, set(), 0.0, -1.0

    def launch(self, lane, batch):
        work = Work.of(batch)
        if (lane, work) not in self._seen and self.device.next_end_s() == float("inf"):
            self._seen.add((lane, work))
            self.now += self.REST_SECONDS
        super().launch(lane, batch)

    def seconds(self, work, lane, share, beside):
        seconds = self._truth.seconds(work, lane, share, beside)
        if share < 1.0 or work.new + work.rows < HARD_TOKENS:
            return seconds
        if self.now > self._hard_until + 0.02:
            self._hard_since = self.now
        self._hard_until = self.now + seconds
        return seconds * (self.FASTER if self.now < self._hard_since + self.FAST_SECONDS else 1.0)


def test_steps_are_measured_at_the_speed_that_the_device_keeps_under_load(calibrated):
    _, calibration, measured = calibrated(60.0, lanes=Resting(TRUTH), settling=0.1)
    whole = [sample for sample in calibration.samples if sample.share == 1.0]
    assert len([sample for sample in whole if sample.work.new]) > 40
    for sample in whole:
        assert sample.seconds == pytest.approx(TRUTH.whole.seconds(sample.work), rel=1e-6), sample
    assert measured.by_kind["hybrid"].p50 < 0.01


def test_a_device_that_pads_its_steps_is_predicted_at_every_size(calibrated):
    padding = Padding((64, 128, 192, 256, 512, 768, 1024, 1536, 2048), rows=16)
    dense = tuple(0.004 + 2e-5 * size for size in padding.tokens)
    whole = Costs(padding.tokens, dense, 2e-9, 1e-8, 3e-8, padding)
    slow = Costs(padding.tokens, tuple(2 * seconds for seconds in dense), 4e-9, 2e-8, 3e-8, padding)
    truth = LatencyModel(whole, tuple(Division(share, slow, slow, 1.1, 1.1) for share in SHARES))
    _, _, measured = calibrated(60.0, truth=truth)
    assert measured.error.p95 < 0.02
    for size in padding.tokens:
        for costs_, true in ((measured.model.whole, whole), (measured.model.divisions[1].prefill, slow)):
            assert costs_.dense(size - 5) == pytest.approx(true.dense(size - 5), rel=0.05), size


def test_noise_is_averaged_out_and_told(calibrated):
    _, _, quiet = calibrated(60.0)
    _, _, noisy = calibrated(60.0, noise=0.1)
    assert quiet.error.p50 < noisy.error.p50 < 0.15
    assert set(noisy.by_kind) == {"decode", "prefill", "hybrid", "decode beside", "prefill beside"}
    assert sum(error.steps for error in noisy.by_kind.values()) == noisy.error.steps == noisy.unseen


@pytest.mark.parametrize("seconds", [4.0, 8.0, 15.0])
def test_no_batch_is_launched_after_the_time_is_over(calibrated, seconds):
    lanes, _, _ = calibrated(seconds)
    assert max(when for _, _, when in lanes.launched) < seconds
    assert lanes.now < seconds + 3 * SLICE_SECONDS


@pytest.mark.parametrize("mode", list(MODES))
def test_without_time_the_least_is_measured_and_gives_a_model_that_means_something(calibrated, mode):
    lanes, calibration, measured = calibrated(0.0, mode)
    assert measured.unseen == 0 and measured.samples == len(calibration.samples) >= 8
    assert lanes.now < 3.0
    for work in (Work(rows=16, context=16 * 500), Work(new=512, pairs=512 * 256.0), Work(new=256, pairs=1e5, rows=32)):
        assert measured.model.whole.seconds(work) == pytest.approx(TRUTH.whole.seconds(work), rel=0.25)


def test_more_time_gives_more_samples_and_no_smaller_a_model(calibrated):
    samples = [calibrated(seconds)[2].samples for seconds in (0.0, 4.0, 10.0, 30.0)]
    assert samples == sorted(samples) and samples[0] < samples[-1]


def test_divisions_that_there_was_no_time_for_are_neither_in_the_model_nor_what_it_is_judged_by(calibrated):
    _, calibration, measured = calibrated(3.0)
    assert [division.share for division in measured.model.divisions] == [SHARES[0]]
    assert measured.unseen and {round(s.share, 3) for s in calibration.unseen} <= {1.0, SHARES[0]}
    assert {round(s.share, 3) for s in calibration.samples} == {1.0, SHARES[0]}


def test_a_mode_with_one_lane_is_measured_on_the_whole_device_only(calibrated):
    lanes, _, measured = calibrated(20.0, "chunked")
    assert measured.model.divisions == ()
    assert {(lane, batch.share) for lane, batch, _ in lanes.launched} == {("D", 1.0)}
    assert any(batch.slices and batch.decode_slots for _, batch, _ in lanes.launched)


def test_where_no_lane_has_both_phases_no_step_has(calibrated):
    lanes, _, measured = calibrated(20.0, "semi")
    assert not any(batch.slices and batch.decode_slots for _, batch, _ in lanes.launched)
    assert all(lane == "P" for lane, batch, _ in lanes.launched if batch.slices)
    assert len(measured.model.divisions) == len(SHARES)


@pytest.mark.parametrize(
    "pool",
    [
        POOL,
        PoolSpec(num_blocks=150, block_size=16, max_num_seqs=40, max_model_len=2100),
        PoolSpec(num_blocks=4, block_size=16, max_num_seqs=64, max_model_len=64),
        PoolSpec(num_blocks=9, block_size=1, max_num_seqs=1, max_model_len=8),
        PoolSpec(num_blocks=1, block_size=32, max_num_seqs=2, max_model_len=20),
    ],
    ids=lambda pool: f"{pool.num_blocks} blocks, {pool.max_num_seqs} slots",
)
@pytest.mark.parametrize("mode", ["auto", "chunked"])
def test_batches_stay_within_the_pool_and_no_two_rows_of_a_step_share_a_block(calibrated, mode, pool):
    lanes, _, _ = calibrated(3.0, mode, pool)
    table = {}
    for _, batch, _ in lanes.launched:
        for update in batch.tables:
            assert update.index == 0 and len(update.blocks) <= pool.max_blocks_per_seq
            assert all(0 <= block < pool.num_blocks for block in update.blocks)
            table[update.slot] = update.blocks
        used = []
        for piece in batch.slices:
            assert piece.tokens and max(piece.tokens) < 1000
            assert piece.start + len(piece.tokens) <= pool.max_model_len
            used += table[piece.slot][: -(-(piece.start + len(piece.tokens)) // pool.block_size)]
            assert len(table[piece.slot]) * pool.block_size >= piece.start + len(piece.tokens)
        for slot, position in zip(batch.decode_slots, batch.decode_positions, strict=True):
            assert 0 <= position < pool.max_model_len
            assert len(table[slot]) * pool.block_size > position
            used += table[slot][: position // pool.block_size + 1]
        assert max([*batch.decode_slots, *(piece.slot for piece in batch.slices)]) < pool.max_num_seqs
        assert len(used) == len(set(used))
        assert not batch.setups  # nothing that a lane would remember of a slot


def test_steps_that_would_take_much_longer_than_a_slice_are_not_asked_for(calibrated):
    _, calibration, _ = calibrated(60.0, fine=True)
    longest = max(s.seconds for s in calibration.samples + calibration.unseen if not s.beside)
    assert longest < 2.5 * SLICE_SECONDS


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (LaneLost("D", "it was killed"), TidegateError),
        (LaneGone("D", "it was killed"), TidegateError),
        (LaneGone("D", "it was killed: lower --max-num-seqs", config=True), ConfigError),
    ],
    ids=["lost", "gone", "gone for what was asked for"],
)
def test_a_lane_that_is_lost_meanwhile_is_told_of(event, error):
    lanes = PredictedLanes(TRUTH)
    lanes.start("D")
    measure = Measure(lanes, POOL, reach_of("chunked"), 1000, 0.0, lambda: lanes.now)
    measure.wait_for({"D"})
    lanes._tell(event)
    with pytest.raises(TidegateError, match="it was killed") as raised:
        measure.trial(least(reach_of("chunked"))[0], lambda: False)
    assert raised.type is error
    measure.close()


def test_a_division_measured_in_part_is_left_out():
    slice_, row = Work(new=64, pairs=2048.0), Work(rows=4, context=400)
    whole = [Sample("D", 1.0, False, work, 0.01) for work in (slice_, row)]
    parts = [Sample("P", 0.5, beside, slice_, 0.02) for beside in (False, False, True)]
    parts += [Sample("D", 0.5, beside, row, 0.02) for beside in (False, False, False, True)]
    assert sound(whole + parts) == whole + parts
    for missing in parts:
        assert sound(whole + [s for s in parts if s is not missing]) == whole


def test_wherever_time_is_over_the_parts_are_known_in_about_as_much_detail_as_the_whole():
    trials = more(reach_of(shares=(0.5, 0.75, 0.25, 0.6)))
    whole = [isinstance(trial, Alone) and trial.share == 1.0 for trial in trials]
    details = whole[whole.index(False) :]  # behind the ladders of the whole device
    rows = [len(list(group)) for _, group in itertools.groupby(details)]
    assert len(rows) > 6 and max(rows[1:]) < 20, rows


def test_the_grid_has_no_step_twice_and_random_ones_are_the_same_for_a_seed():
    trials = least(reach_of()) + more(reach_of(), fine=True)
    assert len(trials) == len(set(trials))
    assert len(least(reach_of())) < len(more(reach_of())) < len(more(reach_of(), fine=True))
    first, again, other = (
        [trial for trial, _ in zip(unseen(reach_of(), seed), range(40), strict=False)] for seed in (1, 1, 2)
    )
    assert first == again != other
