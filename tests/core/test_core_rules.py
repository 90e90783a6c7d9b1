"""What the core promises about order, shares, queues and failures, one promise a test."""

import pytest
from test_core_properties import VOCAB, build, seconds

from tidegate.base.errors import ConfigError
from tidegate.base.events import (
    Aborted,
    Arrived,
    BatchDone,
    BatchEnding,
    Emit,
    LaneLost,
    LaneReady,
    Launch,
    ModeSet,
    SharesSet,
    Wake,
)
from tidegate.base.request import RequestSpec, SamplingParams
from tidegate.core.config import CoreConfig
from tidegate.sim.device import expected_tokens
from tidegate.sim.driver import Simulation
from tidegate.slo.latency import Padding


def spec(name, prompt_len=8, max_tokens=4, **more):
    salt = sum(map(ord, name))
    return RequestSpec(name, [(salt + i * i) % VOCAB for i in range(prompt_len)], max_tokens, **more)


def launches(actions):
    return {a.lane: a.batch for a in actions if isinstance(a, Launch)}


def outputs(actions):
    return [o for a in actions if isinstance(a, Emit) for o in a.outputs]


def ready(core, *lanes):
    for lane in lanes:
        core.on_event(LaneReady(lane), 0.0)


def run(mode, events, **more):
    core, device = build(mode, **more)
    simulation = Simulation(core, device, seconds)
    for time, event in events:
        simulation.at(time, event)
    return core, simulation


def launched(simulation):
    return [(now, a.lane, a.batch) for now, _, actions in simulation.log for a in actions if isinstance(a, Launch)]


def test_a_lane_alone_has_the_whole_device_and_two_lanes_have_their_shares():
    _, simulation = run(
        "semi",
        [
            (0.0, Arrived(spec("first", 8, 20))),
            (0.1, SharesSet({"P": 0.25, "D": 0.75})),
            (0.2, Arrived(spec("second", 40))),
        ],
    )
    simulation.run()
    rows = launched(simulation)
    busy = []  # (start, end, lane, share)
    for now, lane, batch in rows:
        busy.append((now, now + seconds(lane, batch), lane, batch.share))
    assert {share for _, _, lane, share in busy if lane == "D"} == {1.0, 0.75}
    for start, _, lane, share in busy:
        other_runs = any(s <= start < e - 1e-9 for s, e, other, _ in busy if other != lane)
        assert share == ((0.25 if lane == "P" else 0.75) if other_runs else 1.0)


def test_handing_over_from_prefill_to_decode_copies_nothing_and_is_counted():
    core, simulation = run("semi", [(0.0, Arrived(spec(f"r{i}"))) for i in range(3)])
    simulation.run()
    stats = core.stats()
    assert stats.handovers == 3 and stats.handover_copied_bytes == 0
    assert {update.slot for _, lane, batch in launched(simulation) if lane == "D" for update in batch.tables} == set()


def test_a_request_that_has_finished_its_prefill_joins_the_next_decode_step():
    _, simulation = run("semi", [(0.0, Arrived(spec("a", 8, 30))), (0.05, Arrived(spec("b", 8, 30)))])
    simulation.run()
    handed_over = first_output_at(simulation, "b")
    steps = [(now, batch) for now, lane, batch in launched(simulation) if lane == "D"]
    assert any(now < handed_over for now, _ in steps), "a was decoding when b came"
    assert len(next(batch.decode_slots for now, batch in steps if now >= handed_over)) == 2


def first_output_at(simulation, name):
    return next(now for now, _, actions in simulation.log if any(o.id == name for o in outputs(actions)))


def finished_at(simulation, name):
    return next(now for now, _, actions in simulation.log if any(o.id == name and o.finish for o in outputs(actions)))


@pytest.mark.parametrize("mode", ["prefill-first", "chunked", "semi"])
def test_a_short_prompt_does_not_wait_for_the_whole_of_a_long_one(mode):
    events = [(0.0, Arrived(spec("long", 48, 2))), (0.001, Arrived(spec("short", 4, 2)))]
    _, simulation = run(mode, events, budget=8)
    simulation.run()
    assert first_output_at(simulation, "short") < first_output_at(simulation, "long")


def test_a_long_prompt_is_overtaken_only_for_as_long_as_it_would_itself_have_run():
    """Under a stream of short prompts that would keep the lane busy for ever, the long one still gets its turn."""
    stream = [(0.012 * i, Arrived(spec(f"s{i}", 8, 1))) for i in range(400)]
    _, simulation = run(
        "prefill-first", [(0.0, Arrived(spec("long", 48, 1))), *stream], budget=8, prefill_tokens_per_s=500.0
    )
    simulation.run()
    overtaken_by = sum(first_output_at(simulation, f"s{i}") < first_output_at(simulation, "long") for i in range(400))
    assert 0 < overtaken_by < 40


def test_order_arrival_serves_in_order_of_arrival():
    events = [(0.0, Arrived(spec("long", 48, 2))), (0.001, Arrived(spec("short", 4, 2)))]
    _, simulation = run("prefill-first", events, budget=8, order="arrival")
    simulation.run()
    assert first_output_at(simulation, "long") < first_output_at(simulation, "short")


def test_a_lower_priority_value_is_served_first():
    events = [
        (0.0, Arrived(spec("running", 16))),
        *[(0.001, Arrived(spec(n, 8, priority=p))) for n, p in (("later", 5), ("urgent", -1))],
    ]
    _, simulation = run("prefill-first", events, budget=8)
    simulation.run()
    assert first_output_at(simulation, "urgent") < first_output_at(simulation, "later")


def test_prefill_first_lets_decodes_wait_and_chunked_does_not():
    events = [(0.0, Arrived(spec("decoding", 4, 30))), (0.1, Arrived(spec("prompt", 40, 1)))]
    for mode, mixed in (("prefill-first", False), ("chunked", True)):
        _, simulation = run(mode, events, budget=8)
        simulation.run()
        assert any(batch.slices and batch.decode_slots for _, _, batch in launched(simulation)) is mixed


def test_batches_of_mode_pod_are_those_of_chunked_and_may_have_their_attention_fused():
    events = [(0.02 * i, Arrived(spec(f"r{i}", 12 + 5 * i, 10))) for i in range(6)]
    by_mode = {}
    for mode, fused in (("chunked", False), ("pod", True)):
        _, simulation = run(mode, events, budget=8)
        simulation.run()
        batches = [batch for _, _, batch in launched(simulation)]
        assert {batch.fused for batch in batches} == {fused} and any(batch.hybrid for batch in batches)
        by_mode[mode] = [(batch.slices, batch.decode_slots, batch.decode_positions) for batch in batches]
    assert by_mode["pod"] == by_mode["chunked"]


def test_a_change_of_mode_decides_on_fused_attention_from_the_next_batch_on():
    core, simulation = run("chunked", [(0.0, Arrived(spec("a", 8, 30))), (0.1, ModeSet("pod"))])
    simulation.run()
    assert core.mode.name == "pod"
    assert all(batch.fused == (now >= 0.1) for now, _, batch in launched(simulation))


def test_a_batch_never_exceeds_its_token_budget():
    for mode in ("prefill-first", "chunked", "semi"):
        _, simulation = run(mode, [(0.01 * i, Arrived(spec(f"r{i}", 30, 8))) for i in range(8)], budget=12)
        simulation.run()
        for _, _, batch in launched(simulation):
            assert batch.num_prefill_tokens + (len(batch.decode_slots) if batch.slices else 0) <= 12


def test_a_full_queue_rejects_and_serves_the_rest():
    core, simulation = run("semi", [(0.0, Arrived(spec(f"r{i}"))) for i in range(6)], max_waiting=2)
    for lane in core.lanes.values():
        lane.alive = False
    simulation._queue.clear()
    kinds = []
    for i in range(4):
        kinds += [o.finish for o in outputs(core.on_event(Arrived(spec(f"q{i}")), 0.0))]
    assert kinds == ["rejected", "rejected"]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (RequestSpec("e", [], 4), "no tokens"),
        (RequestSpec("l", [1] * 64, 4), "do not fit"),
        (RequestSpec("m", [1], 0), "do not fit"),
        (RequestSpec("v", [VOCAB], 4), "token ids"),
        (RequestSpec("n", [-1], 4), "token ids"),
    ],
)
def test_a_request_that_can_never_run_is_told_why(bad, words):
    core, _ = build()
    (output,) = outputs(core.on_event(Arrived(bad), 0.0))
    assert output.finish == "invalid" and words in output.reason


def test_an_aborted_request_frees_its_blocks_when_its_batch_is_done_and_not_before():
    core, device = build("semi", caching=False)
    ready(core, "P", "D")
    batch = launches(core.on_event(Arrived(spec("a", 12)), 0.0))["P"]
    (output,) = outputs(core.on_event(Aborted("a"), 0.1))
    assert output.finish == "abort"
    assert core.stats().blocks_used == 4
    device.apply(batch.tables)
    core.on_event(BatchDone("P", device.run(batch, 0.1)), 0.2)
    assert core.stats().blocks_used == 0
    assert core.on_event(Aborted("a"), 0.3) == []


def test_a_mode_waits_for_its_lanes_while_the_old_one_goes_on():
    core, _ = build("chunked")
    ready(core, "D")
    actions = core.on_event(ModeSet("semi"), 0.0)
    assert [a for a in actions if isinstance(a, Wake)] == [Wake("P")]
    assert core.mode.name == "chunked"
    assert "D" in launches(core.on_event(Arrived(spec("a")), 0.0))
    core.on_event(LaneReady("P"), 1.0)
    assert core.mode.name == "semi"


def test_a_request_whose_batches_keep_killing_the_lane_fails_and_the_others_do_not():
    core, device = build("semi", caching=False)
    ready(core, "P", "D")
    ends = outputs(core.on_event(Arrived(spec("poison", 12)), 0.0))
    for i in range(3):
        ends += outputs(core.on_event(LaneLost("P", "killed"), i + 0.5))
        core.on_event(LaneReady("P"), i + 0.6)
    (end,) = ends
    assert end.finish == "error" and "3 times" in end.reason
    batch = launches(core.on_event(Arrived(spec("fine", 8, 1)), 9.0))["P"]
    device.apply(batch.tables)
    (output,) = outputs(core.on_event(BatchDone("P", device.run(batch, 0.1)), 9.1))
    assert output.tokens == expected_tokens(spec("fine", 8, 1), VOCAB) and output.finish == "length"


def test_cached_tokens_are_reported_once_and_a_repeated_prompt_computes_only_its_last_block():
    first, again = spec("a", 32, 4), RequestSpec("b", spec("a", 32, 4).prompt, 4)
    _, simulation = run("semi", [(0.0, Arrived(first)), (1.0, Arrived(again))])
    simulation.run()
    assert [o.cached_tokens for o in simulation.outputs["b"]] == [28, 0, 0, 0]
    assert [o.cached_tokens for o in simulation.outputs["a"]] == [0, 0, 0, 0]
    assert [o.tokens for o in simulation.outputs["a"]] == [o.tokens for o in simulation.outputs["b"]]


def test_history_is_sent_when_penalties_need_tokens_that_a_prefix_hit_skipped():
    first = spec("a", 32, 2)
    again = RequestSpec("b", first.prompt, 2, SamplingParams(repetition_penalty=1.2))
    _, simulation = run("semi", [(0.0, Arrived(first)), (1.0, Arrived(again))])
    simulation.run()
    histories = [piece.history for now, _, batch in launched(simulation) for piece in batch.slices if now >= 1.0]
    assert histories == [first.prompt[:28]]


def test_when_blocks_run_out_the_last_comer_is_preempted_and_everyone_ends_right():
    specs = [spec(f"r{i}", 12, 40) for i in range(4)]
    core, simulation = run("semi", [(0.01 * i, Arrived(s)) for i, s in enumerate(specs)], num_blocks=18)
    simulation.run()
    assert core.stats().preemptions > 0
    for s in specs:
        assert [t for o in simulation.outputs[s.id] for t in o.tokens] == expected_tokens(s, VOCAB)
    assert finished_at(simulation, "r0") == min(finished_at(simulation, s.id) for s in specs)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "nonsense"}, "choose one of"),
        ({"order": "nonsense"}, "choose one of"),
        ({"num_blocks": 3}, "--max-model-len"),
        ({"max_num_seqs": 0}, "--max-num-seqs"),
        ({"shares": {"P": 0.5, "D": 0.6}}, "add up to 1"),
        ({"shares": {"P": 0.0, "D": 1.0}}, "between 0 and 1"),
        ({"shares": {"P": 1.0}}, "lanes"),
    ],
)
def test_settings_that_cannot_work_say_what_to_change(settings, words):
    good = {
        "num_blocks": 8,
        "block_size": 4,
        "max_num_seqs": 2,
        "max_model_len": 32,
        "vocab_size": 9,
        "max_num_batched_tokens": 8,
    }
    with pytest.raises(ConfigError, match=words):
        CoreConfig(**{**good, **settings}).validate()


@pytest.mark.parametrize("mode", ["prefill-first", "chunked"])
def test_a_prompt_that_ends_in_the_batch_in_flight_is_decoded_in_the_very_next_one(mode):
    core, device = build(mode)
    ready(core, "D")
    first = launches(core.on_event(Arrived(spec("a", 8, 4)), 0.0))["D"]
    second = launches(core.on_event(BatchEnding("D", first.id), 0.1))["D"]
    assert second.decode_slots == [first.slices[0].slot] and second.decode_positions == [8]
    device.apply(first.tables)
    ended = core.on_event(BatchDone("D", device.run(first, 0.1)), 0.2)
    device.apply(second.tables)
    ended += core.on_event(BatchDone("D", device.run(second, 0.1)), 0.3)
    assert [o.tokens for o in outputs(ended)] == [[t] for t in expected_tokens(spec("a", 8, 4), VOCAB)[:2]]


def test_a_lane_is_given_a_second_batch_only_when_the_first_is_about_to_end():
    core, _ = build("chunked", budget=8)
    ready(core, "D")
    batch = launches(core.on_event(Arrived(spec("a", 40)), 0.0))["D"]
    assert launches(core.on_event(Arrived(spec("b", 8)), 0.1)) == {}
    assert launches(core.on_event(BatchEnding("D", batch.id - 1), 0.1)) == {}, "news of another batch"
    assert "D" in launches(core.on_event(BatchEnding("D", batch.id), 0.2))
    assert launches(core.on_event(BatchEnding("D", batch.id), 0.3)) == {}, "two are in flight"


def test_a_first_token_is_told_when_the_decode_lanes_next_step_starts():
    core, device = build("semi", caching=False)
    ready(core, "P", "D")

    def finish(lane, batch, now):
        device.apply(batch.tables)
        return core.on_event(BatchDone(lane, device.run(batch, 0.1)), now)

    a = launches(core.on_event(Arrived(spec("a", 8, 9)), 0.0))["P"]
    actions = finish("P", a, 0.1)
    assert [o.id for o in outputs(actions)] == ["a"], "the decode lane was idle and starts at once"
    step = launches(actions)["D"]
    b = launches(core.on_event(Arrived(spec("b", 8, 9)), 0.2))["P"]
    assert outputs(finish("P", b, 0.3)) == [], "the decode lane is in the middle of a step"
    actions = finish("D", step, 0.4)
    assert sorted(o.id for o in outputs(actions)) == ["a", "b"]
    assert len(launches(actions)["D"].decode_slots) == 2


def test_a_first_token_that_just_missed_the_next_step_is_told_when_the_one_after_it_starts():
    """That next step was bound before the token came, and the one after it before it had ended: from the token to the
    next, as they are told, is one step and no more."""
    core, device = build("semi", caching=False)
    ready(core, "P", "D")

    def finish(lane, batch, now):
        device.apply(batch.tables)
        return core.on_event(BatchDone(lane, device.run(batch, 0.1)), now)

    def ending(batch, now):
        return core.on_event(BatchEnding("D", batch.id), now)

    a = launches(core.on_event(Arrived(spec("a", 8, 20)), 0.0))["P"]
    first = launches(finish("P", a, 0.1))["D"]
    b = launches(core.on_event(Arrived(spec("b", 8, 20)), 0.15))["P"]
    second = launches(ending(first, 0.19))["D"]
    assert outputs(finish("P", b, 0.195)) == []
    assert [o.id for o in outputs(finish("D", first, 0.2))] == ["a"], "the step that starts now is without b"
    actions = ending(second, 0.29)
    assert outputs(actions) == [], "the step with b is bound, and has not started"
    third = launches(actions)["D"]
    assert len(third.decode_slots) == 2
    assert sorted(o.id for o in outputs(finish("D", second, 0.3))) == ["a", "b"]
    assert sorted(o.id for o in outputs(finish("D", third, 0.4))) == ["a", "b"]


def test_a_first_token_is_not_held_where_that_would_make_it_late():
    def told(ttft_s):
        """Whether b's first token is told when it comes, at 0.23: decode steps take 0.1 s, and one began at 0.2."""
        core, device = build("semi", caching=False)
        ready(core, "P", "D")

        def finish(lane, batch, now):
            device.apply(batch.tables)
            return core.on_event(BatchDone(lane, device.run(batch, 0.1)), now)

        a = launches(core.on_event(Arrived(spec("a", 8, 20)), 0.0))["P"]
        finish("D", launches(finish("P", a, 0.1))["D"], 0.2)
        b = launches(core.on_event(Arrived(spec("b", 8, 20, ttft_s=ttft_s)), 0.21))["P"]
        return [o.id for o in outputs(finish("P", b, 0.23))] == ["b"]

    assert told(ttft_s=0.05)
    assert not told(ttft_s=0.5)


def test_what_a_request_has_generated_is_shared_with_those_that_go_on_from_it():
    first = spec("a", 10, 20)
    answer = expected_tokens(first, VOCAB)
    again = RequestSpec("b", [*first.prompt, *answer, 3], 2)
    _, simulation = run("semi", [(0.0, Arrived(first)), (5.0, Arrived(again))])
    simulation.run()
    assert simulation.outputs["b"][0].cached_tokens == 28, "29 tokens of a were computed, in blocks of 4"


def test_a_hybrid_batch_is_within_the_budget_also_when_its_decodes_are_padded():
    _, simulation = run(
        "chunked",
        [(0.01 * i, Arrived(spec(f"r{i}", 20, 12))) for i in range(6)],
        budget=16,
        num_blocks=60,
        padding=Padding((16, 32), 4),
    )
    simulation.run()
    batches = [batch for _, _, actions in simulation.log for batch in launches(actions).values()]
    hybrid = [batch for batch in batches if batch.slices and batch.decode_slots]
    assert any(len(batch.decode_slots) % 4 for batch in hybrid)
    for batch in hybrid:
        assert batch.num_prefill_tokens + -(-len(batch.decode_slots) // 4) * 4 <= 16
