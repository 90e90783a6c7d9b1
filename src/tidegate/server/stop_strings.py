"""Finding stop strings in text that arrives in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Passes text on up to a stop string, holding back what may turn out to be the beginning of one.

    The match that *ends* first wins, and of those the longest: so the result does not depend on how the text is cut
    into pieces. ``keep``: the stop string itself is passed on too.
    """

    def __init__(self, strings: Sequence[str], keep: bool = False) -> None:
        self.found: str | None = None
        self._strings = strings
        self._keep = keep
        self._held = ""

    def feed(self, text: str) -> str:
        """The text that may be shown now. Once ``found`` is set, nothing more is."""
        if self.found is not None:
            return ""
        held = self._held + text
        best: tuple[int, int] | None = None  # (end, start) of the match
        for string in self._strings:
            start = held.find(string)
            if start >= 0 and (best is None or (start + len(string), start) < best):
                best = (start + len(string), start)
        if best is not None:
            end, start = best
            self.found = held[start:end]
            self._held = ""
            return held[: end if self._keep else start]
        keep_from = len(held) - self._partial_length(held)
        self._held = held[keep_from:]
        return held[:keep_from]

    def flush(self) -> str:
        """What is still held back, once no more text will come."""
        held, self._held = self._held, ""
        return held

    def _partial_length(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = 0
        for string in self._strings:
            for length in range(min(len(string) - 1, len(text)), longest, -1):
                if string.startswith(text[-length:]):
                    longest = length
                    break
        return longest
