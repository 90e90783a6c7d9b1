"""How rows that decode are divided among the thread blocks of FlashInfer's FA2 kernel, where a graph holds its grid.

FlashInfer divides rows among as many thread blocks as run at a time. In a graph with more rows than these it divides
none, and all wait for the longest: on an H200 a decode step of 75 rows of 1,163 tokens on average, of which one
has 7,861, took 10.1 ms, and with all equally long 8.4. But its grid has room for a fourth more than there are rows.
"""

import numpy as np
from numpy.typing import NDArray

LEAST_TOKENS = 128  # that a thread block reads, where its row is divided: FlashInfer's choice, too
PARTS = 4  # a thread block reads at most this part of what falls to each of those that run at a time, if there is room


def blocks_apiece(blocks: NDArray[np.int32], room: int, at_a_time: int, block_size: int) -> int:
    """How many KV blocks of a row, where row i has ``blocks[i]``, a thread block may read at most: the fewest with
    which there are no more than ``room`` pieces, but no fewer than ``PARTS`` and ``LEAST_TOKENS`` allow. It may be more
    than the longest row has. ``at_a_time``: thread blocks of one KV head that run at a time."""
    least = max(1, LEAST_TOKENS // block_size, int(blocks.sum()) // (PARTS * at_a_time))
    most = max(least, int(blocks.max()))
    while least < most:
        middle = (least + most) // 2
        if int((-(-blocks // middle)).sum()) > room:
            least = middle + 1
        else:
            most = middle
    return least
