"""Whatever happens, in whatever order: right tokens, one end a request, no block lost or wrongly shared."""

from collections import Counter

import hypothesis.strategies as st
from hypothesis import given, settings

from tidegate.base.events import Aborted, Arrived, CacheReset, ModeSet, SharesSet, Tick, Tuned
from tidegate.base.request import RequestSpec, SamplingParams
from tidegate.base.specs import PoolSpec
from tidegate.core.config import CoreConfig
from tidegate.core.core import Core
from tidegate.core.request import State
from tidegate.policy.modes import MODES
from tidegate.policy.order import ORDERS
from tidegate.sim.device import FakeDevice, expected_tokens
from tidegate.sim.driver import Simulation
from tidegate.slo.goodput import Metric, Slo
from tidegate.slo.latency import rough

SLO = Slo(0.1, 0.03)
VOCAB = 17  # small: prompts share prefixes, stop ids are hit


def build(mode="semi", caching=True, num_blocks=24, max_num_seqs=6, budget=24, **more):
    config = CoreConfig(
        num_blocks=num_blocks,
        block_size=4,
        max_num_seqs=max_num_seqs,
        max_model_len=64,
        vocab_size=VOCAB,
        max_num_batched_tokens=budget,
        min_slice_tokens=4,
        mode=mode,
        prefix_caching=caching,
        prefix_secret=b"test",
        **{"slo": SLO, "latency": rough(1000.0)} | more,
    )
    core = Core(config)
    pool = PoolSpec(num_blocks, 4, max_num_seqs, 64)
    return core, FakeDevice(pool, VOCAB)


def seconds(lane, batch):
    return (0.01 + 0.001 * batch.num_prefill_tokens + 0.0005 * len(batch.decode_slots)) / batch.share


def check_invariants(core: Core, cache_reset: bool = False) -> None:
    """Holds after every event. ``cache_reset``: the keys of shared blocks may have been forgotten."""
    residency, blocks = core._residency, core._residency.blocks
    held = [r for r in core.requests.values() if r.state in (State.PREFILLING, State.DECODING)]
    flying = Counter()
    leaving = {}
    for lane in core.lanes.values():
        for flight in lane.flights:
            for request in flight.requests():
                flying[request.id] += 1
                if request.state is State.ENDED:
                    leaving[request.id] = request
                else:
                    assert request.lane is lane or request.lane is None
    owners = [*held, *leaving.values()]
    for request in owners:
        assert request.in_flight == flying[request.id]
        assert len(request.blocks) * 4 == request.capacity
        assert request.done <= request.launched <= len(request.tokens)
    references = Counter(block for request in owners for block in request.blocks)
    for block in range(blocks.num_blocks):
        assert blocks.refs(block) == references[block], "a block's references are the requests that name it"
    assert blocks.num_used == len(references)
    assert blocks.num_free + blocks.num_cached + blocks.num_used == blocks.num_blocks
    slots = [request.slot for request in owners]
    assert len(set(slots)) == len(slots) == residency.num_resident
    for block, count in references.items():
        assert count == 1 or block in blocks._key_of or cache_reset, "only published blocks are shared"
    queued = [*core._queues.waiting, *core._queues.prefilling.values(), *core._queues.decoding.values()]
    assert sorted(r.id for r in queued) == sorted(core.requests)


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=40)


@st.composite
def request_specs(draw, number):
    prompt = draw(prompts)
    return RequestSpec(
        id=f"r{number}",
        prompt=prompt,
        max_tokens=draw(st.integers(1, 64 - len(prompt))),
        sampling=SamplingParams(stop_token_ids=tuple(draw(st.sets(st.integers(0, VOCAB - 1), max_size=2)))),
        priority=draw(st.integers(0, 1)),
        cache_salt=draw(st.sampled_from(["", "other"])),
    )


tunings = st.builds(
    Tuned,
    max_num_batched_tokens=st.none() | st.integers(1, 30),
    slice_ms=st.none() | st.floats(1.0, 100.0),
    order=st.none() | st.sampled_from(ORDERS),
    ttft_s=st.none() | st.floats(0.01, 1.0),
    tpot_s=st.none() | st.floats(0.005, 0.2),
    slo_metric=st.none() | st.sampled_from([str(metric) for metric in Metric]),
)


@st.composite
def stories(draw):
    """Requests with arrival times, some aborted; lanes that die; mode and share changes; cache resets."""
    count = draw(st.integers(1, 10))
    times = st.floats(0, 1.5, allow_nan=False)
    events, specs, aborted = [], [], set()
    for i in range(count):
        spec = draw(request_specs(i))
        start = draw(times)
        specs.append(spec)
        events.append((start, Arrived(spec)))
        if draw(st.integers(0, 4)) == 0:
            aborted.add(spec.id)
            events.append((start + draw(times) / 4, Aborted(spec.id)))
    for _ in range(draw(st.integers(0, 4))):
        events.append((draw(times), ModeSet(draw(st.sampled_from(sorted(MODES))))))
    for _ in range(draw(st.integers(0, 3))):
        share = draw(st.floats(0.1, 0.9))
        events.append((draw(times), SharesSet({"P": share, "D": 1 - share})))
    for _ in range(draw(st.integers(0, 2))):
        events.append((draw(times), draw(tunings)))
    if draw(st.booleans()):
        events.append((draw(times), CacheReset()))
    losses = draw(st.lists(st.tuples(st.sampled_from(["P", "D"]), times, st.floats(0.01, 0.3)), max_size=2))
    return specs, events, aborted, losses


@given(
    story=stories(),
    rule=st.sampled_from([(mode.name, gate) for mode in MODES.values() for gate in mode.gates]),
    tpot_s=st.sampled_from([0.03, 0.2]),
    caching=st.booleans(),
    num_blocks=st.sampled_from([16, 24, 60]),
    ending=st.sampled_from([None, 0.0, 0.7]),
    order=st.sampled_from(ORDERS),
)
@settings(max_examples=200, deadline=None)
def test_any_story_ends_with_the_right_tokens_and_all_blocks_back(
    story, rule, tpot_s, caching, num_blocks, ending, order
):
    specs, events, aborted, losses = story
    mode, gate = rule
    core, device = build(mode, caching, num_blocks, order=order, gate=gate, slo=Slo(0.1, tpot_s))
    simulation = Simulation(core, device, seconds, ending)
    for time, event in events:
        simulation.at(time, event)
    for lane, time, back in losses:
        if lane in {spec.name for spec in MODES[mode].lanes}:
            simulation.lose_lane(lane, time, back)
    cache_reset = any(isinstance(event, CacheReset) for _, event in events)
    simulation.run(observe=lambda: check_invariants(core, cache_reset))
    for spec in specs:
        outputs = simulation.outputs[spec.id]
        finishes = [o.finish for o in outputs if o.finish is not None]
        assert len(finishes) == 1 and outputs[-1].finish is not None, "exactly one terminal output, and it is the last"
        tokens = [token for o in outputs for token in o.tokens]
        expected = expected_tokens(spec, VOCAB)
        if finishes[0] in ("stop", "length"):
            assert tokens == expected
            assert finishes[0] == ("stop" if tokens[-1] in spec.sampling.stop_token_ids else "length")
        else:
            assert finishes[0] == "abort" and spec.id in aborted
            assert tokens == expected[: len(tokens)]
    assert core.requests == {}
    assert core._residency.blocks.num_used == 0 and core._residency.num_resident == 0


@given(story=stories(), mode=st.sampled_from(sorted(MODES)))
@settings(max_examples=30, deadline=None)
def test_a_recorded_story_replays_to_the_same_actions(story, mode):
    _, events, _, losses = story
    core, device = build(mode)
    simulation = Simulation(core, device, seconds)
    for time, event in events:
        simulation.at(time, event)
    for _, time, _ in losses:
        simulation.lose_lane("D", time, 0.1)
    simulation.run()
    again, _ = build(mode)
    for now, event, actions in simulation.log:
        assert again.on_event(event, now) == actions


def test_ticks_change_nothing():
    core, _ = build()
    assert core.on_event(Tick(), 1.0) == []
