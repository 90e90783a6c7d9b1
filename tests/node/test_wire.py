"""Messages cross a socket whole and in order, however the bytes are cut."""

import socket

import hypothesis.strategies as st
import msgspec
from hypothesis import given, settings

from tidegate.base.request import Output, RequestSpec, SamplingParams
from tidegate.node import wire

messages = st.lists(
    st.one_of(
        st.builds(wire.Abort, st.text(max_size=20)),
        st.builds(
            wire.Submit,
            st.builds(
                RequestSpec,
                id=st.text(min_size=1, max_size=8),
                prompt=st.lists(st.integers(0, 2**31 - 1), max_size=50),
                max_tokens=st.integers(1, 100),
                sampling=st.builds(SamplingParams, seed=st.integers(0, 2**63), logit_bias=st.just({3: 1.5})),
            ),
        ),
    ),
    max_size=10,
)


@given(sent=messages, cuts=st.lists(st.integers(1, 40), min_size=1, max_size=20))
@settings(max_examples=60, deadline=None)
def test_any_cut_of_the_stream_gives_the_same_messages(sent, cuts):
    ours, theirs = socket.socketpair()
    channel = wire.Channel(ours, wire.ToNode)
    stream = b"".join(wire.pack(message) for message in sent)
    received = []
    position = 0
    while position < len(stream):
        step = cuts[position % len(cuts)]
        theirs.sendall(stream[position : position + step])
        position += step
        got, closed = channel.receive()
        received += got
        assert not closed
    theirs.close()
    assert channel.receive() == ([], True)
    channel.close()
    assert received == sent


def test_what_the_socket_does_not_take_is_kept_and_sent_later():
    ours, theirs = socket.socketpair()
    sender, receiver = wire.Channel(ours, wire.ToNode), wire.Channel(theirs, wire.FromNode)
    big = wire.Outputs([Output("x", list(range(200_000)))] * 4)
    sender.send(big)
    sender.send(wire.Fatal("end"))
    received = []
    while sender.wants_write or len(received) < 2:
        received += receiver.receive()[0]
        sender.flush()
    assert received == [big, wire.Fatal("end")]
    sender.close()
    receiver.close()


def test_every_message_is_msgpack_with_a_tag():
    for message in (wire.Abort("x"), wire.Ask(1, mode="semi"), wire.Shutdown(), wire.StopLane(), wire.LaneUp("P")):
        decoded = msgspec.msgpack.decode(wire.pack(message)[4:])
        assert isinstance(decoded, dict) and isinstance(decoded["type"], str)
