"""What a search for goodput shows while it goes on: a row for each probe, and in the end what was found."""

from collections.abc import Sequence

from tidegate.bench import goodput, sweep
from tidegate.bench.goodput_table import HEADER, found_text, probe_text, sweep_text
from tidegate.bench.probe import Judging, Probe
from tidegate.bench.screen import ProgressLine, say
from tidegate.bench.sweep import Row, State, best_row
from tidegate.bench.table import slo_text


class GoodputScreen(ProgressLine, goodput.Watcher, sweep.Watcher):
    def __init__(self, judging: Judging) -> None:
        super().__init__()
        self._judging = judging
        self._goal: int | None = None  # the SLO that the last rows were about

    def begun(self, row: Row) -> None:
        self._goal = None
        say(f"\n── {row.name} ".ljust(79, "─"))

    def probed(self, probe: Probe) -> None:
        self.clear()
        if probe.goal != self._goal:
            self._goal = probe.goal
            say(f"\n{slo_text(probe.verdicts[probe.goal].slo)}, by {self._judging.threshold:.0%} of requests\n{HEADER}")
        say(probe_text(probe))

    def ended(self, row: Row) -> None:
        if row.state in (State.REFUSED, State.SAME, State.CUT_OFF):
            notes = {
                State.REFUSED: f"The server refuses this: {row.note}",
                State.SAME: f"The server does the same as with {row.note}.",
                State.CUT_OFF: "Cut off: this is far below the best so far (--cut-off).",
            }
            say(notes[row.state])
        else:
            self._say_found(row)

    def summary(self, rows: Sequence[Row], *, complete: bool) -> None:
        """``complete``: the search was neither interrupted nor ended by an error."""
        self.clear()
        if not rows:
            return
        if rows[0].setting:
            say("\n" + sweep_text(rows))
            best = best_row(rows)
            if not complete:
                say("This is not all: it was broken off. The server keeps the setting that was tried last.")
            elif best is not None:
                say(f"The server now has the best setting: {best.name}.")
        else:
            say("")
            self._say_found(rows[0])
            if not complete:
                say("This is not all: it was broken off.")

    def _say_found(self, row: Row) -> None:
        for found in row.found:
            say(found_text(found, self._judging))
