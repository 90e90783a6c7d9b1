"""Kept latency models: found again for the same, for nothing else, and never in the way."""

import logging

import msgspec
import pytest

from tidegate.base.errors import ConfigError
from tidegate.base.specs import ModelSpec
from tidegate.base.stats import PredictionError
from tidegate.node import latency_cache
from tidegate.node.calibrate import Measured
from tidegate.node.latency_cache import Key
from tidegate.slo.latency import LatencyModel, rough

SPEC = ModelSpec("LlamaForCausalLM", 2, 64, 4, 2, 16, 128, 500, 4096)
KEY = Key(SPEC, None, "float32", "cpu, 2 cores", "a processor", "core sets", {"D": "PD", "P": "P"}, 64, 16)
MEASURED = Measured(rough(1000.0), 30, 8, PredictionError(8, 0.03, 0.1), {"decode": PredictionError(8, 0.03, 0.1)})


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tidegate" / "latency"


def test_what_was_kept_is_found_again_and_lies_where_caches_belong(cache):
    assert latency_cache.cached(KEY) is None
    latency_cache.keep(KEY, MEASURED)
    assert latency_cache.cached(KEY) == MEASURED
    assert [path.parent for path in cache.iterdir()] == [cache]


@pytest.mark.parametrize(
    "other",
    [
        {"model": msgspec.structs.replace(SPEC, num_layers=3)},
        {"quantization": "int8"},
        {"kv_dtype": "bfloat16"},
        {"device": "cpu, 4 cores"},
        {"processor": "another"},
        {"sharing": "green contexts"},
        {"lanes": {"D": "D", "P": "P"}},
        {"max_num_seqs": 128},
        {"block_size": 32},
        {"torch": "9.9"},
        {"code": "of another version"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_for_anything_else_nothing_is_found(other):
    latency_cache.keep(KEY, MEASURED)
    assert latency_cache.cached(msgspec.structs.replace(KEY, **other)) is None


def test_any_change_to_the_code_that_runs_in_steps_is_another_key(tmp_path, monkeypatch):
    package = tmp_path / "tidegate"
    files = [package / pattern.replace("**/*", "some") for pattern in latency_cache.IN_STEPS]
    for file in (*files, package / "node" / "some.py"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("faster = False")
    monkeypatch.setattr(latency_cache, "__file__", str(package / "node" / "latency_cache.py"))

    def digest():
        return latency_cache.code.__wrapped__()

    seen = [digest()]
    (package / "node" / "some.py").write_text("other = True")
    assert digest() == seen[0], "what runs in no step does not matter"
    for file in files:
        file.write_text("faster = True")
        seen.append(digest())
    (package / "kernels" / "some.py").rename(package / "kernels" / "other.py")
    seen.append(digest())
    assert len(set(seen)) == len(seen)


def spoiled(record):
    whole = msgspec.json.encode(record)
    yield "empty", b""
    yield "cut off", whole[: len(whole) // 2]
    yield "not JSON", b"\x00\xff"
    yield "something else", b"[1, 2]"
    yield "an older format", msgspec.json.encode(msgspec.structs.replace(record, format=0))
    yield (
        "of something else",
        msgspec.json.encode(msgspec.structs.replace(record, key=msgspec.structs.replace(KEY, block_size=1))),
    )


@pytest.mark.parametrize(
    "body",
    [pytest.param(body, id=what) for what, body in spoiled(latency_cache.Record.of(KEY, MEASURED))],
)
def test_a_file_that_cannot_be_used_is_ignored_with_one_line_and_replaced(caplog, body):
    path = latency_cache.path_of(KEY)
    path.parent.mkdir(parents=True)
    path.write_bytes(body)
    with caplog.at_level(logging.WARNING):
        assert latency_cache.cached(KEY) is None
    assert len(caplog.records) == 1 and str(path) in caplog.text
    latency_cache.keep(KEY, MEASURED)
    assert latency_cache.cached(KEY) == MEASURED


def test_a_cache_that_cannot_be_written_does_no_harm(caplog, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    latency_cache.keep(KEY, MEASURED)
    assert len(caplog.records) == 1
    assert latency_cache.cached(KEY) is None


def test_a_write_that_fails_leaves_what_was_there_and_no_rest(cache, monkeypatch):
    latency_cache.keep(KEY, MEASURED)

    def fail(self, target):
        raise OSError("the disk is full")

    monkeypatch.setattr("pathlib.Path.replace", fail)
    latency_cache.keep(KEY, msgspec.structs.replace(MEASURED, samples=99))
    assert latency_cache.cached(KEY) == MEASURED
    assert len(list(cache.iterdir())) == 1


def test_a_file_that_was_written_for_somebody_is_read_whatever_it_is_of(tmp_path):
    latency_cache.write(tmp_path / "model.json", KEY, MEASURED)
    assert latency_cache.read(tmp_path / "model.json").measured == MEASURED
    # It is a latency model, also for who knows nothing of measurements.
    assert msgspec.json.decode((tmp_path / "model.json").read_bytes(), type=LatencyModel) == MEASURED.model
    (tmp_path / "other.json").write_text(f'{{"format": {latency_cache.FORMAT}}}')
    with pytest.raises(ConfigError, match=r"other\.json is not a latency model"):
        latency_cache.read(tmp_path / "other.json")


def test_what_a_user_names_is_a_measured_model_with_its_error_or_any_latency_model(tmp_path):
    latency_cache.write(tmp_path / "measured.json", KEY, MEASURED)
    assert latency_cache.given(tmp_path / "measured.json") == (MEASURED.model, str(MEASURED))
    (tmp_path / "bare.json").write_bytes(msgspec.json.encode(MEASURED.model))
    assert latency_cache.given(tmp_path / "bare.json") == (MEASURED.model, str(tmp_path / "bare.json"))
