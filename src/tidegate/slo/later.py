"""Values that a gate may not look at, and that take time to work out."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, overload

Value = TypeVar("Value")


class WorkedOutLater(Sequence[Value]):
    """A sequence that is worked out, once, when somebody looks at it."""

    def __init__(self, work_out: Callable[[], list[Value]]) -> None:
        self._work_out = work_out
        self._known: list[Value] | None = None

    def _values(self) -> list[Value]:
        if self._known is None:
            self._known = self._work_out()
        return self._known

    def __len__(self) -> int:
        return len(self._values())

    def __iter__(self) -> Iterator[Value]:
        return iter(self._values())

    @overload
    def __getitem__(self, index: int) -> Value: ...

    @overload
    def __getitem__(self, index: slice) -> list[Value]: ...

    def __getitem__(self, index: int | slice) -> Value | list[Value]:
        return self._values()[index]
