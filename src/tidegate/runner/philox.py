"""Randomness as a function: a counter-based generator, so that no state has to survive a restart.

Philox4x32-10 of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).
"""

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HIGH = np.uint64(32)

Words = NDArray[np.uint64]  # each element holds one 32-bit word


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Ten rounds of Philox over arrays of equal shape: four random words for each (counter, key)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        even, odd = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (odd >> _HIGH) ^ c1 ^ k0, odd & _LOW, (even >> _HIGH) ^ c3 ^ k1, even & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each (seed, position)."""
    counter = positions.astype(np.uint64)
    zero = np.zeros_like(counter)
    high, low, _, _ = philox4x32((counter & _LOW, counter >> _HIGH, zero, zero), (seeds & _LOW, seeds >> _HIGH))
    return ((high << np.uint64(21)) | (low >> np.uint64(11))).astype(np.float64) * 2.0**-53
