"""A lane that moves to another place goes on in the old one until what it needs has been prepared in the new."""

from hypothesis import given
from hypothesis import strategies as st

from tidegate.device.places import Place
from tidegate.node.moves import Moves
from tidegate.runner.shapes import StepShape

LADDER = [StepShape(0, n) for n in (1, 2, 4, 8)]
SMALL, LARGE = LADDER[0], LADDER[-1]


class Lane:
    """Graphs are pairs in a set."""

    def __init__(self):
        self.whole, self.old, self.new = Place(), Place(), Place()
        self.graphs = {(shape, place) for shape in LADDER for place in (self.whole, self.old)}
        self.moves = Moves(lambda shape, place: (shape, place) in self.graphs, LADDER, self.whole, self.old)

    def capture_next(self):
        self.graphs.add(self.moves.next())
        self.moves.captured()

    def capture_all(self):
        while self.moves.next():
            self.capture_next()


def test_steps_stay_in_the_old_place_until_their_graph_is_captured_in_the_new_one():
    lane = Lane()
    assert lane.moves.place_for(LARGE, lane.old) is lane.old
    lane.moves.aim(lane.new)
    assert lane.moves.place_for(LARGE, lane.new) is lane.old
    assert lane.moves.next() == (LARGE, lane.new), "what was used lately comes first"
    assert lane.moves.in_force is lane.old
    lane.capture_next()
    assert lane.moves.in_force is lane.new
    assert lane.moves.place_for(LARGE, lane.new) is lane.new
    assert lane.moves.place_for(SMALL, lane.new) is lane.old, "this one is not captured yet"
    lane.capture_all()
    assert lane.moves.place_for(SMALL, lane.new) is lane.new


def test_a_lane_alone_runs_on_the_whole_device_while_it_is_moving():
    lane = Lane()
    lane.moves.aim(lane.new)
    assert lane.moves.place_for(LARGE, lane.whole) is lane.whole
    assert lane.moves.place_for(LARGE, lane.new) is lane.old, "the other lane runs: not over its part"


def test_steps_that_only_run_on_the_whole_device_are_captured_nowhere_else():
    lane = Lane()
    hybrid = StepShape(208, 48)
    lane.graphs.add((hybrid, lane.whole))
    assert lane.moves.place_for(hybrid, lane.whole) is lane.whole
    lane.moves.aim(lane.new)
    lane.capture_all()
    assert lane.graphs == {(shape, place) for shape in LADDER for place in (lane.whole, lane.old, lane.new)} | {
        (hybrid, lane.whole)
    }


def test_a_place_that_nobody_announced_is_prepared_once_it_is_wanted():
    lane = Lane()
    assert lane.moves.next() is None
    assert lane.moves.place_for(LARGE, lane.new) is lane.old
    assert lane.moves.next() == (LARGE, lane.new)


def test_a_shape_that_is_prepared_nowhere_runs_where_it_is_wanted():
    lane = Lane()
    assert lane.moves.place_for(StepShape(64, 1), lane.new) is lane.new


@given(st.lists(st.tuples(st.sampled_from(["aim", "step", "capture"]), st.integers(0, 3), st.sampled_from(LADDER))))
def test_no_step_ever_waits_for_a_capture_and_every_move_ends(story):
    lane = Lane()
    places = [lane.whole, lane.old, lane.new, Place()]
    for what, place, shape in story:
        if what == "aim":
            lane.moves.aim(places[place])
        elif what == "step":
            assert (shape, lane.moves.place_for(shape, places[place])) in lane.graphs
        elif lane.moves.next():
            lane.capture_next()
    lane.moves.aim(lane.new)
    lane.capture_all()
    assert lane.moves.in_force is lane.new
    assert all(lane.moves.place_for(shape, lane.new) is lane.new for shape in LADDER)
