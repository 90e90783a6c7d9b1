"""The file that ``tidegate bench goodput --save`` writes."""

import platform
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from tidegate import __version__
from tidegate.bench.probe import Judging
from tidegate.bench.sweep import Row


class GoodputFile(msgspec.Struct, frozen=True):
    """``schema`` changes when what a reader relies on does. ``server``: what a Tidegate server says of its engine,
    with a sweep. ``rows``: one for each combination of settings, one without a sweep; see ``sweep.Row``,
    ``goodput.Found`` and ``probe.Probe``. ``started``: seconds since the epoch. ``interrupted`` by the user, or by
    ``error``: rows are missing, or the last is unfinished."""

    SCHEMA: ClassVar = 1

    schema: int
    kind: str
    versions: dict[str, str]
    started: float
    interrupted: bool
    error: str | None
    settings: dict[str, Any]
    server: Any
    judging: Judging
    rows: Sequence[Row]

    @classmethod
    def of(
        cls,
        settings: dict[str, Any],
        judging: Judging,
        rows: Sequence[Row],
        *,
        started: float,
        server: Any,
        interrupted: bool,
        error: str | None,
    ) -> "GoodputFile":
        return cls(
            schema=cls.SCHEMA,
            kind="tidegate bench goodput",
            versions={"tidegate": __version__, "python": platform.python_version()},
            started=started,
            interrupted=interrupted,
            error=error,
            settings=settings,
            server=server,
            judging=judging,
            rows=rows,
        )
