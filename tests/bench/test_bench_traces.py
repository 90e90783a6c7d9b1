"""Traces are read in their formats, in order of time, and refused with the line that is wrong."""

from itertools import islice

import pytest

from tidegate.base.batch import BatchResult
from tidegate.base.errors import ConfigError
from tidegate.base.events import Aborted, Arrived, BatchDone, LaneReady, Launch
from tidegate.base.request import RequestSpec
from tidegate.bench.payload import Payloads
from tidegate.bench.plan import Amount, mean_rate, replayed_requests
from tidegate.bench.traces import load_trace
from tidegate.bench.workloads import Request
from tidegate.core.config import CoreConfig
from tidegate.core.core import Core
from tidegate.core.record import Recorder

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.6805900,396,109
2023-11-16 18:15:48.1805900,879,55
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 1300, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 4500, "input_length": 1400, "output_length": 6, "hash_ids": [0, 1, 3]}
{"timestamp": 4500, "input_length": 600, "output_length": 7, "hash_ids": [4, 5]}
"""


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "trace"
        path.write_text(text)
        return path

    return write


def test_azures_csv_in_order_of_time_from_zero(write):
    trace = load_trace(write(AZURE))
    assert trace.timed
    assert [(r.prompt_tokens, r.output_tokens) for r in trace.recorded] == [(374, 44), (879, 55), (396, 109)]
    assert [r.at_s for r in trace.recorded] == pytest.approx([0.0, 1.5, 4.0])


def test_mooncakes_json_lines_with_their_blocks(write):
    trace = load_trace(write(MOONCAKE))
    assert trace.timed
    assert trace.recorded[1] == Request(1400, 6, 3.5, (0, 1, 3))


@pytest.mark.parametrize("text", ["3,4\n50,6\n", "input,output\n3,4\n\n50,6\n"])
def test_plain_lengths_with_or_without_a_header(write, text):
    trace = load_trace(write(text))
    assert not trace.timed
    assert trace.recorded == [Request(3, 4), Request(50, 6)]


def record(path, requests):
    """Runs them through a core of which everything is recorded, one after another; "gone" is aborted at once."""
    core = Core(CoreConfig(32, 4, 4, 64, vocab_size=10, max_num_batched_tokens=64, mode="chunked"))
    with path.open("wb") as file:
        on_event = Recorder(core, file).on_event
        on_event(LaneReady("D"), 0.0)
        for at_s, name, prompt, output in requests:
            actions = on_event(Arrived(RequestSpec(name, [1] * prompt, output)), at_s)
            if name == "gone":
                on_event(Aborted(name), at_s)
            while batch := next((action.batch for action in actions if isinstance(action, Launch)), None):
                result = BatchResult(batch.id, [2] * batch.num_sampled, None, 0.001)
                actions = on_event(BatchDone("D", result), at_s + 0.001)


def test_what_a_server_recorded_is_a_trace_of_the_requests_that_got_tokens(tmp_path):
    path = tmp_path / "events.log"
    record(path, [(10.0, "a", 5, 3), (10.5, "b", 8, 1), (10.7, "gone", 9, 4), (11.0, "c", 3, 6)])
    trace = load_trace(path)
    assert trace.timed
    assert trace.recorded == [Request(5, 3, 0.0), Request(8, 1, 0.5), Request(3, 6, 1.0)]
    record(path, [(10.0, "gone", 5, 3)])
    with pytest.raises(ConfigError, match="No request in the log"):
        load_trace(path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("3,4\n5\n", "Line 2 "),
        ("3,4\n0,4\n", "Line 2 .*1 or more"),
        (AZURE + "yesterday,3,4\n", "Line 5 "),
        (AZURE + "2023-11-16 18:15:46,3\n", "Line 5 "),
        ('{"timestamp": 0, "input_length": "x"}\n', "Line 1 "),
        ('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}', "1 blocks do not cover 600"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        ("", "no requests"),
    ],
)
def test_what_is_not_a_trace_is_refused_with_the_line(write, text, problem):
    with pytest.raises(ConfigError, match=problem):
        load_trace(write(text))


def test_a_file_that_can_not_be_read_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match="can't be read"):
        load_trace(tmp_path)


def test_replay_is_faster_by_the_speedup_and_ends_with_the_trace_or_the_amount(write):
    trace = load_trace(write(AZURE))
    assert [r.at_s for r in replayed_requests(trace, 2.0, Amount())] == pytest.approx([0.0, 0.75, 2.0])
    assert len(replayed_requests(trace, 1.0, Amount(num_requests=2))) == 2
    assert len(replayed_requests(trace, 1.0, Amount(seconds=4.0))) == 2
    assert len(replayed_requests(trace, 2.0, Amount(seconds=4.0))) == 3
    assert mean_rate(replayed_requests(trace, 2.0, Amount())) == pytest.approx(1.5)


def common_prefix(one, other):
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_prompts_begin_alike_as_far_as_their_blocks_are_the_same(write):
    first, second, third = load_trace(write(MOONCAKE)).recorded
    payloads = Payloads("m")
    prompts = [payloads.prompt(1, i, request) for i, request in enumerate((first, second, third))]
    assert [len(prompt) for prompt in prompts] == [1300, 1400, 600]
    assert common_prefix(prompts[0], prompts[1]) == 1024
    assert common_prefix(prompts[0], prompts[2]) < 5


def test_a_trace_used_up_begins_again_without_repeating_its_prompts(write):
    trace = load_trace(write(MOONCAKE))
    first, *_, repeated = islice(trace.requests(), 4)
    assert (repeated.prompt_tokens, repeated.output_tokens) == (first.prompt_tokens, first.output_tokens)
    payloads = Payloads("m")
    assert common_prefix(payloads.prompt(1, 0, first), payloads.prompt(1, 3, repeated)) < 5
