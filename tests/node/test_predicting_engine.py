"""An engine whose gate decides from predictions: measured at its start, kept, and without a trace in its answers."""

import json
from pathlib import Path

import pytest
from engine_driver import EngineDriver, mixed_prompts

from tidegate.base.errors import ConfigError
from tidegate.core.record import read_log, replay
from tidegate.models.sources import open_model
from tidegate.node import latency_cache
from tidegate.node.backend import make_backend
from tidegate.node.config import EngineConfig
from tidegate.node.predictions import Subject
from tidegate.policy.modes import MODES
from tidegate.slo.goodput import Slo

VOCAB = 193  # of the tiny model


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of this module's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def config(model, **more):
    settings = {"mode": "auto", "slo": Slo(2.0, 0.1), "calibration_seconds": 2.0, "num_blocks": 600} | more
    return EngineConfig(model=model, max_model_len=2100, max_num_seqs=40, max_num_batched_tokens=512, **settings)


@pytest.fixture(scope="module")
def auto(tiny_model, cache, tmp_path_factory):
    """Measures, as nothing is kept yet."""
    log = tmp_path_factory.mktemp("log") / "events"
    with EngineDriver(config(tiny_model[0], record=str(log))) as engine:
        engine.log = log
        yield engine


def test_it_measures_at_its_start_and_says_so(auto):
    said = auto.engine.info.predictions
    assert said.startswith("measured in ") and "p50" in said and "p95" in said


def test_of_the_measurement_nothing_is_left(auto):
    stats = auto.stats()
    assert stats.blocks_free == stats.blocks_total and stats.blocks_cached == 0
    assert stats.prediction_errors == {} and all(lane.batches == 0 for lane in stats.lanes.values())


def test_tokens_after_a_measurement_equal_the_references_and_errors_are_told(auto, references):
    answers = auto.answers([auto.spec(r.prompt, len(r.tokens)) for r in references])
    ties = sum(expected.check(answer.tokens) for expected, answer in zip(references, answers, strict=True))
    assert ties <= len(answers) // 4
    stats = auto.stats()
    assert {"decode", "prefill"} <= set(stats.prediction_errors)
    assert sum(error.steps for error in stats.prediction_errors.values()) == sum(
        lane.batches for lane in stats.lanes.values()
    )
    assert all(0.0 <= error.p50 <= error.p95 for error in stats.prediction_errors.values())
    assert stats.prediction_factors["decode"] > 0.0


def test_sampled_tokens_are_those_of_an_engine_that_has_measured_nothing(auto, tiny_model):
    """Penalties look at a slot's earlier tokens, and a draw at its parameters: both would show what was left there."""
    kinds = (
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 0.8, "seed": 7, "top_k": 9, "logit_bias": {3: 4.0}},
        {"temperature": 0.0},
    )
    prompts = mixed_prompts(24, 300, VOCAB, seed=4)

    def answers(engine):
        specs = [engine.spec(prompt, 12, **kinds[i % len(kinds)]) for i, prompt in enumerate(prompts)]
        return [answer.tokens for answer in engine.answers(specs)]

    with EngineDriver(config(tiny_model[0], mode="semi", slo=None)) as other:
        assert other.engine.info.predictions == ""
        assert answers(auto) == answers(other)


def test_what_it_decided_from_predictions_replays(auto):
    auto.answers([auto.spec([i + 1] * 90, 20) for i in range(6)])
    events = replay(auto.log)
    assert events > 26
    core, _ = read_log(auto.log)
    (kept,) = latency_cache.folder().iterdir()
    assert core.latency == latency_cache.read(kept).measured.model


def test_the_next_start_takes_what_was_kept(auto, tiny_model):
    with EngineDriver(config(tiny_model[0])) as again:
        assert again.engine.info.predictions.startswith("measured before: ")


def subject(settings):
    source = open_model(settings.model, settings.load_format, settings.seed)
    backend = make_backend(settings, source, lambda stage, fraction: None)
    return Subject(settings, MODES[settings.mode], source.spec, backend.size_pool(settings), backend)


def test_what_was_kept_counts_for_nothing_else_and_not_if_it_is_to_be_measured_again(auto, tiny_model, tmp_path):
    assert subject(config(tiny_model[0])).kept() is not None
    assert subject(config(tiny_model[0], calibration_seconds=9.0, slice_ms=50.0)).kept() is not None
    shape = json.loads((Path(tiny_model[0]) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(shape | {"num_hidden_layers": 2}))
    for other in (
        config(tiny_model[0], recalibrate=True),
        config(str(tmp_path), load_format="dummy"),
        config(tiny_model[0], block_size=32),
        config(tiny_model[0], quantization="int8"),
        config(tiny_model[0], mode="semi"),
    ):
        assert subject(other).kept() is None


def test_a_given_file_is_taken_and_a_wrong_one_refused(auto, tiny_model, tmp_path):
    (kept,) = latency_cache.folder().iterdir()
    given = subject(config(tiny_model[0], latency_model=str(kept))).given()
    assert given.model == latency_cache.read(kept).measured.model and given.source.startswith("as given: ")
    (tmp_path / "other.json").write_text("{}")
    for wrong in ("nowhere.json", "other.json"):
        with pytest.raises(ConfigError, match=wrong):
            subject(config(tiny_model[0], latency_model=str(tmp_path / wrong))).given()


def test_predictions_without_an_slo_are_refused_before_anything_is_measured(tiny_model, cache):
    with pytest.raises(ConfigError, match="--slo"):
        EngineDriver(config(tiny_model[0], slo=None))
