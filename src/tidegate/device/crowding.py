"""How many threads to use on cores that other processes may be using too.

The threads of a step wait for each other some tens of times in a millisecond. While the cores are ours, waiting awake
for a moment makes a step up to twice as fast as going to sleep each time. But a thread that never sleeps is not let in
first when it has something to do: beside one busy process, steps on as many threads as cores then take three times as
long. So while its threads are kept waiting for a core, a lane uses fewer of them.
"""

from collections.abc import Callable
from pathlib import Path

CROWDED_FRACTION = 0.2  # of the time that batches took, that their threads together waited for a core
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 3.0
SHORTEST_LOOK_SECONDS = 0.02  # of work between two looks at the account, which cost some 50 us each


def waited_seconds() -> float:
    """How long this process's threads have been ready to run and had no core, together, since they were started."""
    total_ns = 0
    for task in Path("/proc/self/task").iterdir():
        try:
            total_ns += int((task / "schedstat").read_text().split()[1])
        except (OSError, IndexError):
            continue  # the thread has just ended, or this kernel keeps no such account
    return total_ns / 1e9


class Crowding:
    """One thread fewer when crowded; one more when a pause has passed, which doubles each time that it was in vain."""

    def __init__(self, waited: Callable[[], float] = waited_seconds) -> None:
        self._waited = waited
        self._waited_before = waited()
        self._worked_seconds = 0.0  # since then
        self._spared = 0  # cores without a thread
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._try_at_s = 0.0

    def threads(self, cores: int) -> int:
        """How many to use for the next batch."""
        return max(1, cores - self._spared)

    def ran(self, cores: int, seconds: float, now: float) -> None:
        """A batch took so long on ``threads(cores)`` threads."""
        self._worked_seconds += seconds
        if self._worked_seconds < SHORTEST_LOOK_SECONDS:
            return
        waited = self._waited()
        crowded = waited - self._waited_before > CROWDED_FRACTION * self._worked_seconds
        self._waited_before, self._worked_seconds = waited, 0.0
        if crowded and self.threads(cores) > 1:
            self._spared += 1
            self._try_at_s = now + self._pause_seconds
            self._pause_seconds = min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS)
        elif not crowded and now >= self._try_at_s:
            if self._spared == 0:
                self._pause_seconds = FIRST_PAUSE_SECONDS
            self._spared = max(0, self._spared - 1)
            self._try_at_s = now + self._pause_seconds
