"""Attention of prompts and decodes in one kernel on a GPU: what two kernels compute, in graphs that are replayed for
one batch after another, chosen by a rule that is measured here."""

import pytest
from engine_driver import EngineDriver, mixed_prompts
from gpu_lane import Lane
from test_gpu_engine import MAX_TOKENS, check, config

from tidegate.base.batch import Batch, Slice
from tidegate.kernels.pod_rule import APART, AXES, POD, Axes, PodRule

FILLED = 700  # tokens that each slot holds before the steps that are compared


@pytest.fixture(scope="module")
def lane(tiny_on_gpu):
    """Whose rule always fuses, with prompts in all slots."""
    lane = Lane(tiny_on_gpu[0], PodRule(dict.fromkeys(AXES.points(), (2.0, 1.0))))
    for slot in range(8):
        lane.runner.enqueue(lane.prefill(prompt(slot, 0, FILLED), slot), lane.places.of("D", 1.0)).collect()
    return lane


def prompt(slot, start, count):
    """The tokens from ``start`` on of the slot's prompt; steps write no others, so that they leave the KV as it is."""
    return [(7 * slot + 3 * position) % 900 + 1 for position in range(start, start + count)]


def hybrid(slices, decodes, fused):
    """``slices``: (slot, start, count); ``decodes``: slot and position."""
    pieces = [Slice(slot, start, prompt(slot, start, count), True) for slot, start, count in slices]
    return Batch(0, 1.0, pieces, list(decodes), list(decodes.values()), [], [], fused)


def logits_of(lane, slices, decodes, fused):
    """Of each row of a hybrid batch."""
    batch, place = hybrid(slices, decodes, fused), lane.places.of("D", 1.0)
    enqueued = lane.runner.enqueue(batch, place)
    enqueued.collect()
    return lane.runner._graphs[lane.shape(batch), place].logits[enqueued.rows].float().clone()


STEPS = [
    ([(0, 0, 200)], {1: 600}),
    ([(0, 0, 64), (2, 37, 1), (3, 500, 300)], {1: 699, 4: 3, 5: 250, 6: 16, 7: 15}),
    ([(0, 650, 17)], {1: 1, 2: 31, 3: 32}),
    ([(slot, 10 * slot, 120) for slot in range(6)], {6: 500, 7: 698}),
    ([(0, 100, 900)], {slot: 80 * slot for slot in range(1, 8)}),
]


@pytest.mark.parametrize("case", range(len(STEPS)))
def test_one_kernel_computes_what_two_compute(lane, case):
    slices, decodes = STEPS[case]
    before = lane.runner.hybrid_attention
    apart = logits_of(lane, slices, decodes, fused=False)
    assert lane.runner.hybrid_attention == before, "batches that may not be fused are not counted"
    fused = logits_of(lane, slices, decodes, fused=True)
    assert lane.runner.hybrid_attention[POD] == before[POD] + 1
    assert float((fused - apart).abs().max() / apart.std()) < 0.15, "but for rounding"


def test_a_graph_gives_each_batch_its_own_result_whatever_ran_before_it(lane):
    expected = [logits_of(lane, *case, fused=True) for case in STEPS]
    for order in ([4, 2, 0, 3, 1], [1, 1, 0, 0, 4, 3, 2]):
        for case in order:
            logits = logits_of(lane, *STEPS[case], fused=True)
            assert float((logits - expected[case]).abs().max() / logits.std()) < 0.15


def test_steps_of_both_forms_can_be_enqueued_behind_one_another(lane):
    place = lane.places.of("D", 1.0)
    pending = [lane.runner.enqueue(hybrid(*STEPS[1], fused=i % 2 == 0), place) for i in range(6)]
    answers = [enqueued.collect().tokens for enqueued in pending]
    assert answers[0] == answers[2] == answers[4] and answers[1] == answers[3] == answers[5]
    assert sum(a != b for a, b in zip(answers[0], answers[1], strict=True)) <= 1, "bf16 breaks a tie otherwise, seldom"


def test_a_trial_finds_the_same_results_and_leaves_nothing_in_the_pool(tiny_on_gpu):
    from tidegate.models.sources import open_model
    from tidegate.runner.pod_trial import measure

    lane = Lane(tiny_on_gpu[0])
    pool = lane.runner._pool
    axes = Axes((16, 128, 512), (0, 500), (1, 16), (200, 1000))
    trial = measure(open_model(tiny_on_gpu[0]).spec, pool.kv, lane.places.of("D", 1.0), axes)
    print(f"results differ by {trial.difference:.4f}; {PodRule(trial.seconds, axes)}")
    assert trial.difference < 0.02
    assert set(trial.seconds) == set(axes.points())
    assert all(apart > 0 and pod > 0 for apart, pod in trial.seconds.values())
    assert not pool.kv.any()


def test_mode_pod_answers_like_transformers_counts_its_choices_and_changes_to_chunked_and_back(tiny_on_gpu):
    path, model = tiny_on_gpu
    prompts = mixed_prompts(32, 2000, 1000, seed=8)
    with EngineDriver(config(path, mode="pod", max_num_batched_tokens=512, prefix_caching=False)) as engine:
        counts = []
        for mode in ("pod", "chunked", "pod"):
            engine.run(engine.engine.set_mode(mode))
            answers = engine.answers([engine.spec(prompt, MAX_TOKENS) for prompt in prompts])
            check(model, prompts, answers, mode)
            counts.append(engine.stats().lanes["D"].hybrid_attention)
        print(f"hybrid batches: {counts}")
        assert counts[0].keys() == {APART, POD} and sum(counts[0].values()) > 0
        assert counts[1] == counts[0] and sum(counts[2].values()) > sum(counts[1].values())
        assert engine.stats().blocks_used == 0
