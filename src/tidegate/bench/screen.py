"""What a measurement shows while it goes on: results on stdout, and on a terminal a line of progress on stderr."""

import sys

from tidegate.base.clock import now_s
from tidegate.bench.load import Progress
from tidegate.bench.report import RunResult
from tidegate.bench.session import Watcher
from tidegate.bench.table import rate_text, run_text

_PERIOD_S = 0.2  # of progress
_BAR_WIDTH = 24


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class ProgressLine:
    """Of one run after another: the two methods that a watcher of any measurement has."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._rate = ""
        self._shown_s = 0.0

    def preparing(self, rate: float | None) -> None:
        self._rate = rate_text(rate)
        self._show("preparing prompts")

    def progress(self, counts: Progress) -> None:
        if self._terminal and now_s() - self._shown_s >= _PERIOD_S:
            bar = f"{'█' * (_BAR_WIDTH * counts.done // counts.total):░<{_BAR_WIDTH}}"
            failed = f", {counts.failed} failed" if counts.failed else ""
            self._show(f"{bar} {counts.done} of {counts.total} done, {counts.sent - counts.done} running{failed}")

    def clear(self) -> None:
        self._show("")

    def _show(self, text: str) -> None:
        if self._terminal:
            self._shown_s = now_s()
            sys.stderr.write("\r\x1b[K" + (f"{self._rate} {text}" if text else ""))
            sys.stderr.flush()


class Screen(ProgressLine, Watcher):
    def finished(self, run: RunResult) -> None:
        self.clear()
        say("\n" + run_text(run))
