"""Where lanes run under each form of sharing."""

import pytest

from tidegate.device.places import FORMS, HIGH_PRIORITY, Part, Places


class Divisible:
    """A GPU of 100 SMs, divided in steps of one; streams are numbers."""

    total = 100

    def __init__(self):
        self.streams = []

    def pair(self, share):
        first = round(share * self.total)
        return Part(first, True), Part(self.total - first, False)

    def new_stream(self, part, priority):
        self.streams.append((part, priority))
        return len(self.streams)


@pytest.fixture(params=list(FORMS))
def places(request):
    return Places(Divisible(), FORMS[request.param])


def test_a_lane_alone_has_the_whole_device(places):
    assert places.of("P", 1.0).sms == places.of("D", 1.0).sms == 100


def test_the_same_place_is_the_same_object_and_no_two_lanes_have_one_in_common(places):
    for share in (0.3, 0.5, 1.0):
        assert places.of("P", share) is places.of("P", share)
        assert places.of("P", share) is not places.of("D", share)


def test_disjoint_parts_together_are_the_device():
    places = Places(Divisible(), FORMS["disjoint"])
    for share in (0.2, 0.5, 0.9):
        assert places.of("P", share).sms == round(100 * share)
        assert places.of("P", share).sms + places.of("D", 1 - share).sms == 100


def test_capped_keeps_prefill_to_its_part_and_decode_in_one_place():
    places = Places(Divisible(), FORMS["capped"])
    assert places.of("P", 0.25).sms == 25
    assert places.of("D", 0.75) is places.of("D", 0.1) is places.of("D", 1.0)


def test_streams_ignore_shares_and_let_decode_go_first():
    device = Divisible()
    places = Places(device, FORMS["streams"])
    assert places.of("P", 0.25) is places.of("P", 1.0)
    assert places.of("D", 0.75) is places.of("D", 1.0)
    assert device.streams == [(None, 0)] * 2 + [(None, HIGH_PRIORITY)] * 2, (
        "a graph keeps its capture stream's priority"
    )
