"""Which events of a stream are tokens, however the bytes are cut, and what makes an answer a failure."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import DONE, event, usage

from tidegate.bench.stream import StreamReader, Usage


def read(*parts, asked=3, all_expected=True):
    """The closed reader of a stream whose part i came at time i."""
    reader = StreamReader()
    reader.begin(200)
    for now, part in enumerate(parts):
        reader.receive(part, float(now))
    reader.close(asked, all_expected=all_expected)
    return reader


def chat(content=None, role=None, finish=None, **more):
    delta = {key: value for key, value in {"content": content, "role": role, **more}.items() if value is not None}
    return b"data: " + json.dumps({"choices": [{"delta": delta, "finish_reason": finish}]}).encode() + b"\n\n"


def test_each_event_with_a_choice_is_a_token_at_the_time_it_came():
    reader = read(event(), event(), event(finish="length"), usage(7, 3), DONE)
    assert list(reader.times_s) == [0.0, 1.0, 2.0]
    assert reader.tokens == 3
    assert reader.usage == Usage(7, 3)
    assert reader.failure is None


def test_a_token_without_text_counts_because_detokenizers_hold_text_back():
    assert list(read(event(""), event(), event(finish="length")).times_s) == [0.0, 1.0, 2.0]


def test_several_events_in_one_part_have_one_time():
    assert list(read(event() + event(), event(finish="length")).times_s) == [0.0, 0.0, 1.0]


@given(st.data())
def test_events_are_the_same_however_the_bytes_are_cut(data):
    stream = event() + b": comment\r\n\r\n" + event().replace(b"\n", b"\r\n") + event("", "length") + usage(7, 3) + DONE
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=12)))
    parts = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    reader = read(*parts)
    assert len(reader.times_s) == reader.tokens == 3
    assert list(reader.times_s) == sorted(reader.times_s)
    assert reader.failure is None


def test_the_opening_of_a_chat_is_no_token():
    reader = read(chat("", role="assistant"), chat("a"), chat("b"), chat("c", finish="length"), DONE)
    assert list(reader.times_s) == [1.0, 2.0, 3.0]


def test_a_role_on_every_event_of_a_chat_does_not_make_them_openings():
    events = [chat("a", role="assistant"), chat("", role="assistant"), chat("c", role="assistant", finish="length")]
    assert list(read(*events).times_s) == [0.0, 1.0, 2.0]


def test_reasoning_counts_as_tokens():
    assert len(read(chat(reasoning_content="x"), chat(reasoning="y"), chat("z", finish="length")).times_s) == 3


@pytest.mark.parametrize("last", [event("", "length"), chat(finish="length")])
def test_a_farewell_without_text_is_a_token_only_if_one_is_missing(last):
    assert list(read(event(), event(), event(), last).times_s) == [0.0, 1.0, 2.0]
    assert list(read(event(), event(), last).times_s) == [0.0, 1.0, 2.0]
    assert list(read(event(), event(), last, usage(1, 2), all_expected=False).times_s) == [0.0, 1.0]


def test_the_server_knows_best_how_many_tokens_its_events_carried():
    assert read(event(), event(finish="length"), usage(1, 8), asked=8).tokens == 8


def test_without_usage_a_full_length_answer_has_as_many_tokens_as_were_asked_for():
    reader = read(event(), event(finish="length"), asked=8)
    assert reader.tokens == 8
    assert reader.failure is None


def test_fewer_tokens_than_asked_for_fail_where_all_are_expected():
    early = [event(), event(finish="stop"), DONE]
    failure = read(*early).failure
    assert failure.kind == "too few tokens"
    assert "2 of 3" in failure.message and "stop" in failure.message
    assert read(*early, all_expected=False).failure is None


@pytest.mark.parametrize("all_expected", [True, False])
def test_an_answer_without_a_token_fails(all_expected):
    assert read(usage(1, 0), DONE, all_expected=all_expected).failure.kind == "too few tokens"


def test_an_error_in_the_stream_is_the_failure():
    broken = b'data: {"error": {"message": "the engine stopped", "code": 500}}\n\n'
    failure = read(event(), broken, DONE).failure
    assert failure.kind == "stream"
    assert "the engine stopped" in failure.message


def test_what_is_no_json_is_a_protocol_failure_that_shows_it():
    failure = read(event(), b"data: oh no\n\n").failure
    assert failure.kind == "protocol"
    assert "oh no" in failure.message


def test_a_status_other_than_200_is_the_failure_with_the_servers_words():
    reader = StreamReader()
    reader.begin(429)
    reader.receive(b"the queue ", 0.0)
    reader.receive(b"is full", 1.0)
    reader.close(3, all_expected=True)
    assert (reader.failure.kind, reader.failure.message) == ("http 429", "the queue is full")


def test_a_connection_lost_after_the_last_event_does_no_harm():
    for parts, kind in (([event(), DONE], None), ([event()], "connection")):
        reader = StreamReader()
        reader.begin(200)
        for part in parts:
            reader.receive(part, 0.0)
        reader.lost("connection", "it closed")
        reader.close(1, all_expected=True)
        assert (reader.failure.kind if reader.failure else None) == kind
