"""Latency models in files: both forms are read, and anything else is told in one sentence that names the file."""

import msgspec
import pytest

from tidegate.base.errors import ConfigError
from tidegate.slo.latency import LatencyModel, rough
from tidegate.slo.latency_file import FORMAT, read_latency_model

MODEL = rough(30_000.0)
FIELDS = msgspec.to_builtins(MODEL)
WHOLE = FIELDS["whole"]


def written(tmp_path, content):
    path = tmp_path / "model.json"
    path.write_bytes(content if isinstance(content, bytes) else msgspec.json.encode(content))
    return path


def test_a_latency_model_by_itself_is_read(tmp_path):
    assert read_latency_model(written(tmp_path, MODEL)) == MODEL


def test_one_among_what_tells_of_its_measurement_is_read(tmp_path):
    content = {"format": FORMAT, "key": {"device": "a GPU"}, "samples": 3, **FIELDS}
    assert read_latency_model(str(written(tmp_path, content))) == MODEL


def test_a_device_that_is_not_divided_has_one_too(tmp_path):
    assert read_latency_model(written(tmp_path, {"whole": WHOLE})) == LatencyModel(MODEL.whole)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(b"\x00\xff", "not a latency model", id="not JSON"),
        pytest.param([1, 2], "Expected `object`", id="a list"),
        pytest.param({"divisions": []}, "missing required field `whole`", id="nothing of the whole device"),
        pytest.param(
            {"format": FORMAT + 1, **FIELDS},
            f"has format {FORMAT + 1}, not",
            id="a later format",
        ),
        pytest.param({"whole": WHOLE | {"tokens": [256]}}, "tokens do not ascend, are fewer", id="one size"),
        pytest.param({"whole": WHOLE | {"tokens": [9, 8]}}, "tokens do not ascend", id="sizes that descend"),
        pytest.param({"whole": WHOLE | {"pair_s": -1.0}}, "times that are negative", id="negative times"),
        pytest.param({"whole": WHOLE | {"dense_s": [0.0, 0.0]}}, "batches that take none", id="no times"),
        pytest.param({"whole": WHOLE, "divisions": FIELDS["divisions"][::-1]}, "do not ascend between", id="shares"),
    ],
)
def test_anything_else_is_refused_with_the_reason(tmp_path, content, reason):
    path = written(tmp_path, content)
    with pytest.raises(ConfigError, match=reason) as told:
        read_latency_model(path)
    assert str(told.value).startswith(f"{path} is not a latency model") and "\n" not in str(told.value)


def test_a_file_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"nowhere\.json can't be read as a latency model: No such file"):
        read_latency_model("nowhere.json")
