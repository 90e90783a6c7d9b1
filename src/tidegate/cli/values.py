"""Values of flags, as argparse takes them."""

import argparse
import os

UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30, "": 1}


def size(text: str) -> int:
    """ "2GiB", "500M", "1073741824" as bytes."""
    number = text.lower().removesuffix("b")
    unit = number.lstrip("0123456789.")
    if unit not in UNITS or not number.removesuffix(unit):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 2GiB or 500M")
    return int(float(number.removesuffix(unit)) * UNITS[unit])


def core_list(text: str) -> tuple[int, ...]:
    """ "0-2,5" as (0, 1, 2, 5)."""
    cores: set[int] = set()
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    except ValueError:
        raise argparse.ArgumentTypeError(f'{text!r} is not a list of cores such as "0-3,6"') from None
    missing = cores - os.sched_getaffinity(0)
    if missing or not cores:
        raise argparse.ArgumentTypeError(f"this process may not use cores {sorted(missing)}")
    return tuple(sorted(cores))
