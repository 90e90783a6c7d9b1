"""Divisions that are prepared beside the one in force, as a state machine without processes."""

from hypothesis import given
from hypothesis import strategies as st

from tidegate.node.rotation import MOST_FAILURES, Division, Prepare, Retire, Rotation, Spare, Swap


def division(percent):
    return Division((("P", percent),))


A, B, C = division(50), division(70), division(30)


def test_a_division_is_prepared_while_the_old_one_serves_and_then_takes_over():
    rotation = Rotation(A)
    assert rotation.want(B) == [Prepare(B)]
    assert rotation.active == A
    assert rotation.prepared() == [Swap(B)]
    assert (rotation.active, rotation.spare, rotation.state) == (B, A, Spare.READY)


def test_going_back_takes_no_preparation():
    rotation = Rotation(A)
    rotation.want(B)
    rotation.prepared()
    assert rotation.want(A) == [Swap(A)]


def test_a_third_division_waits_until_the_spare_one_has_ended():
    rotation = Rotation(A)
    rotation.want(B)
    rotation.prepared()
    assert rotation.want(C) == [Retire(A)]
    assert rotation.want(C) == []
    assert rotation.retired() == [Prepare(C)]
    assert rotation.prepared() == [Swap(C)]
    assert rotation.active == C


def test_a_wish_that_changes_while_one_is_prepared_does_not_throw_it_away():
    rotation = Rotation(A)
    rotation.want(B)
    assert rotation.want(C) == []
    assert rotation.prepared() == [Swap(B), Retire(A)]
    assert rotation.retired() == [Prepare(C)]


def test_a_wish_that_is_taken_back_leaves_the_division_in_force_where_it_is():
    rotation = Rotation(A)
    rotation.want(B)
    assert rotation.want(A) == []
    assert rotation.prepared() == []
    assert (rotation.active, rotation.spare) == (A, B)
    assert rotation.want(B) == [Swap(B)]


def test_one_that_dies_while_it_is_prepared_is_tried_again_and_then_given_up_until_another_is_wanted():
    rotation = Rotation(A)
    moves = rotation.want(B)
    for _ in range(MOST_FAILURES):
        assert moves == [Prepare(B)] and not rotation.gave_up
        assert rotation.failed() == [Retire(B)]
        moves = rotation.retired()
    assert moves == [] and rotation.gave_up and rotation.active == A
    assert rotation.want(B) == []
    assert rotation.want(C) == [Prepare(C)]
    assert not rotation.gave_up


def test_a_spare_that_dies_asleep_is_ended_and_nothing_else_changes():
    rotation = Rotation(A)
    rotation.want(B)
    rotation.prepared()
    assert rotation.failed() == [Retire(A)]
    assert rotation.retired() == []
    assert (rotation.active, rotation.state) == (B, Spare.NONE)


def test_when_all_has_ended_the_wanted_division_is_the_one_to_start():
    rotation = Rotation(A)
    rotation.want(B)
    rotation.reset()
    assert (rotation.active, rotation.state) == (B, Spare.NONE)


EVENTS = st.lists(st.sampled_from(["want A", "want B", "want C", "up", "dies", "ended", "reset"]), max_size=40)


@given(EVENTS)
def test_in_any_story_there_is_at_most_one_spare_and_the_last_wish_is_had_in_the_end(story):
    rotation = Rotation(A)
    running = {A}

    def carry_out(moves):
        for move in moves:
            match move:
                case Prepare(one):
                    assert len(running) == 1, "one beside the one in force, and no more"
                    running.add(one)
                case Swap(one):
                    assert one in running and rotation.spare in running
                case Retire(one):
                    assert one in running and one != rotation.active

    def happen(event):
        preparing, ready = rotation.state is Spare.PREPARING, rotation.state is Spare.READY
        if event.startswith("want"):
            carry_out(rotation.want({"A": A, "B": B, "C": C}[event[-1]]))
        elif event == "up" and preparing:
            carry_out(rotation.prepared())
        elif event == "dies" and (preparing or ready):
            carry_out(rotation.failed())
        elif event == "ended" and rotation.state is Spare.ENDING:
            running.remove(rotation.spare)
            carry_out(rotation.retired())
        elif event == "reset":
            rotation.reset()
            running.clear()
            running.add(rotation.active)
        assert rotation.active in running

    for event in story:
        happen(event)
    for _ in range(6):
        happen("up")
        happen("ended")
    assert rotation.active == rotation.wanted or rotation.gave_up
