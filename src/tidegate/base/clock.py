"""The only module that reads a clock. Everything else takes ``now`` as an argument.

now_s()      seconds, monotonic: what the core, the lanes and all durations use
wall_s()     seconds since the epoch: for people (the ``created`` field, log lines)
"""

import time


def now_s() -> float:
    """Monotonic seconds. Comparable between processes of one machine (CLOCK_MONOTONIC)."""
    return time.monotonic()


def wall_s() -> float:
    """Seconds since the Unix epoch."""
    return time.time()
