"""Where each of a lane's batches runs while the lane moves to another place: a graph runs where it was captured, so
those for the new place have to be captured first, and until then the lane goes on where it has them.
"""

from collections.abc import Callable, Sequence

from tidegate.device.places import Place
from tidegate.runner.shapes import StepShape

LATELY = 4  # shapes


class Moves:
    """Used by the lane's thread; ``in_force`` may be read by any."""

    def __init__(
        self, prepared: Callable[[StepShape, Place], bool], ladder: Sequence[StepShape], whole: Place, beside: Place
    ) -> None:
        """``ladder``: the shapes of the lane's steps beside another lane, for which ``beside`` is prepared already."""
        self._prepared, self._ladder, self._whole = prepared, ladder, whole
        self._parts = [beside]  # that steps have run in or may, the latest last
        self._lately: tuple[StepShape, ...] = ()
        self._target: Place | None = None  # what graphs are being captured for
        self._beside = beside

    @property
    def in_force(self) -> Place:
        """Where the lane runs while another one does."""
        return self._beside

    def aim(self, place: Place) -> None:
        """The lane's place is to be this one, as soon as may be."""
        if place is self._whole:
            return  # it is there always
        self._target = place
        self._settle()

    def place_for(self, shape: StepShape, wanted: Place) -> Place:
        """Where to run a step: where it is wanted, if that place is prepared for it; else in the latest that is."""
        if wanted is not self._whole:  # what only runs there needs nothing captured elsewhere
            self._lately = (shape, *(other for other in self._lately if other != shape))[:LATELY]
        if self._prepared(shape, wanted):
            place = wanted
        else:
            if wanted is not self._target:
                self.aim(wanted)
            known = (*reversed(self._parts), self._whole)
            able = (place for place in known if self._prepared(shape, place))
            place = next(able, wanted)
        self._remember(place)
        return place

    def next(self) -> tuple[StepShape, Place] | None:
        """What to capture next when there is time: shapes used lately come first."""
        if self._target is not None:
            for shape in (*self._lately, *self._ladder):
                if not self._prepared(shape, self._target):
                    return shape, self._target
            self._target = None
        return None

    def captured(self) -> None:
        """What ``next`` named has been prepared."""
        self._settle()

    def _settle(self) -> None:
        """Once steps as of late can run in the target, the lane has moved."""
        target = self._target
        if target is not None and all(self._prepared(shape, target) for shape in self._lately or self._ladder):
            self._beside = target
            self._remember(target)

    def _remember(self, place: Place) -> None:
        if place is not self._whole and place is not self._parts[-1]:
            self._parts = [*(other for other in self._parts if other is not place), place]
