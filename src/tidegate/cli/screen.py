"""What commands that start an engine say while it starts."""

import sys


class Screen:
    """Start-up messages on stderr; progress overwrites one line where that is a terminal."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._open = False  # whether the cursor stands on a progress line
        self._stage = ""

    def line(self, text: str) -> None:
        print("\r\x1b[K" * self._open + text, file=sys.stderr, flush=True)
        self._open = False

    def progress(self, stage: str, fraction: float) -> None:
        if self._terminal:
            bar = f" {'█' * int(fraction * 24):░<24} {fraction:4.0%}" if fraction else " …"
            print(f"\r\x1b[K{stage}{bar}", end="", file=sys.stderr, flush=True)
            self._open = True
        elif stage != self._stage:
            print(stage, file=sys.stderr, flush=True)
        self._stage = stage
