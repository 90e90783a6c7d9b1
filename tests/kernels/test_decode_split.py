"""How rows that decode are divided among thread blocks: within the grid, no finer than is worth it."""

import numpy as np
import pytest

from tidegate.kernels.decode_split import LEAST_TOKENS, PARTS, blocks_apiece

SIZE = 16


def rows(count, seed, spread):
    """KV blocks of rows whose lengths are lognormal."""
    return np.maximum(1, np.random.default_rng(seed).lognormal(4.0, spread, count)).astype(np.int32)


def pieces(blocks, apiece):
    return int((-(-blocks // apiece)).sum())


@pytest.mark.parametrize("count", [34, 75, 300, 512])
@pytest.mark.parametrize("spread", [0.0, 0.5, 1.0, 2.0])
def test_the_pieces_fit_and_one_block_less_would_not_or_is_not_worth_it(count, spread):
    for seed in range(20):
        blocks, room = rows(count, seed, spread), count + count // 4 - 1
        apiece = blocks_apiece(blocks, room, 33, SIZE)
        assert pieces(blocks, apiece) <= room
        fine = apiece == max(LEAST_TOKENS // SIZE, blocks.sum() // (PARTS * 33))
        assert fine or pieces(blocks, apiece - 1) > room


def test_a_row_much_longer_than_the_others_is_divided_and_equal_ones_are_not():
    equal = np.full(64, 60, dtype=np.int32)
    assert blocks_apiece(equal, 79, 33, SIZE) >= 60
    uneven = equal.copy()
    uneven[-1] = 1000
    apiece = blocks_apiece(uneven, 79, 33, SIZE)
    assert 60 <= apiece <= 67  # the long one's, 16 pieces: 63 + 16 is the room


def test_rows_of_padding_alone_are_one_piece_each():
    assert blocks_apiece(np.ones(48, dtype=np.int32), 59, 33, SIZE) >= 1
