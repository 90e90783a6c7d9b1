"""Runs of the same decodes taken at once leave everything exactly as taking each step through the core does."""

from collections import deque
from enum import Enum

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings
from small import Asked, engine

from tidegate.base.events import Aborted, CacheReset, ModeSet, SharesSet, Tuned
from tidegate.core.steady import SteadyRun
from tidegate.policy.modes import MODES
from tidegate.sim.engine import Host
from tidegate.slo.goodput import Metric, Slo

HOSTS = [Host(0.0, 0.0, 0.0), Host(0.0008, 0.0016, 0.0015), Host(0.002, 0.0005, 0.0), Host(0.0, 0.5, 0.0)]
CHANGES = [
    SharesSet({"P": 0.3, "D": 0.7}),
    Tuned(max_num_batched_tokens=24, slice_ms=10.0),
    Tuned(ttft_s=1.0, tpot_s=0.02),
    CacheReset(),
    ModeSet("prefill-first"),
    ModeSet("semi"),
]


@st.composite
def stories(draw):
    """Requests, some of which are aborted, with pauses in which decodes go on undisturbed; changes of settings."""
    story, at_s = [], 0.0
    for index in range(draw(st.integers(1, 12))):
        at_s += draw(st.sampled_from([0.0, 0.004, 0.05, 0.4, 2.0])) * draw(st.floats(0.5, 1.5))
        story.append((at_s, Asked(draw(st.integers(1, 150)), draw(st.integers(1, 120)))))
        if draw(st.integers(0, 4)) == 0:
            story.append((at_s + 0.1, Aborted(str(draw(st.integers(0, index))))))
        if draw(st.integers(0, 4)) == 0:
            story.append((at_s + 0.1, draw(st.sampled_from(CHANGES))))
    return sorted(story, key=lambda told: told[0])


def readings_of(simulated, story):
    """Everything that can be read after each event of the story, and at the end."""
    readings = []
    for at_s, what in story:
        if isinstance(what, Asked):
            simulated.submit(what, at_s)
        elif not isinstance(what, ModeSet) or {s.name for s in MODES[what.mode].lanes} <= set(simulated.core.lanes):
            simulated.tell(what, at_s)  # but for a mode with a lane that would have to be started
        readings.append(reading(simulated))
    simulated.advance()
    return [*readings, reading(simulated)]


def reading(simulated):
    core, device = simulated.core, simulated.device
    queues, residency = core._queues, core._residency
    return {
        "now": simulated.now,
        "records": list(simulated.records),
        "running": {name: list(answer.times_s) for name, answer in simulated._answers.items()},
        "device": [values(r) for r in device._running.values()],
        "busy": (dict(device.busy_s), dict(device.spent_s), device._rng.getstate()),
        "stats": msgspec.to_builtins(core.stats()),
        "lanes": {name: values(lane) for name, lane in core.lanes.items()},
        "requests": {name: values(request) for name, request in core.requests.items()},
        "queues": [[r.id for r in q] for q in (queues.waiting, queues.prefilling.values(), queues.decoding.values())],
        "blocks": values(residency.blocks),
        "slots": list(residency._slots),
        "gate": values(core.gate),
        "shares": dict(core.shares),
        "last event": core._now,
        "schedule": values(core._guidance._schedule),
        "binder": (core._binder._next_batch_id, values(core._binder.totals)),
    }


def values(thing):
    """An object as plain values; requests and lanes within it by name."""
    if isinstance(thing, Enum):
        return thing
    if isinstance(thing, dict):
        return {key: values(value) for key, value in thing.items()}
    if isinstance(thing, list | tuple | deque | set | frozenset):
        return [named(value) for value in thing]
    if isinstance(thing, msgspec.Struct):
        return msgspec.to_builtins(thing)
    names = [*getattr(type(thing), "__slots__", ()), *getattr(thing, "__dict__", ())]
    return {name: named(getattr(thing, name)) for name in names} if names else thing


def named(thing):
    kind = type(thing).__name__
    return (kind, getattr(thing, "id", None) or thing.name) if kind in ("Request", "Lane") else values(thing)


@given(
    story=stories(),
    run_by=st.sampled_from([(mode.name, gate) for mode in MODES.values() for gate in mode.gates]),
    host=st.sampled_from(HOSTS),
    num_blocks=st.sampled_from([100, 130, 400]),
    noise=st.sampled_from([0.0, 0.1]),
    caching=st.booleans(),
    metric=st.sampled_from(list(Metric)),
)
@settings(max_examples=120, deadline=None)
def test_any_story_reads_the_same_after_each_event(story, run_by, host, num_blocks, noise, caching, metric):
    def told(one_by_one):
        simulated = engine(
            run_by[0],
            gate=run_by[1],
            host=host,
            noise=noise,
            one_by_one=one_by_one,
            num_blocks=num_blocks,
            prefix_caching=caching,
            slo=Slo(0.2, 0.03, metric),
        )
        return readings_of(simulated, story)

    for at_once, step_by_step in zip(told(False), told(True), strict=True):
        assert at_once.keys() == step_by_step.keys()
        for what, value in step_by_step.items():
            assert at_once[what] == value, what


@pytest.mark.parametrize("mode", sorted(MODES))
def test_a_lone_long_answer_passes_in_few_events(mode, monkeypatch):
    simulated = engine(mode, host=HOSTS[1])
    events, runs = [], []
    on_event, close = simulated.core.on_event, SteadyRun.close
    monkeypatch.setattr(simulated.core, "on_event", lambda event, now: events.append(event) or on_event(event, now))
    monkeypatch.setattr(SteadyRun, "close", lambda run: runs.append(run) or close(run))
    simulated.submit(Asked(20, 300), 0.0)
    simulated.advance()
    assert [served.output_tokens for served in simulated.records] == [300]
    assert len(events) < 12 and len(runs) == 1
