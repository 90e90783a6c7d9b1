"""Ownership of KV blocks. One thread (the core's) allocates, shares and releases; lanes hold ids only.

A block is always in exactly one of three states:

    free    nothing in it matters
    used    reference count >= 1: some request's block list names it
    cached  reference count 0, but published under a key: a later request with the same prefix may share it.
            Cached blocks are given away, least recently released first, when no free block is left

Only the content of *published* blocks is shared, and a block is published only once all its positions have been
computed and acknowledged; from then on nobody writes it until it has been evicted.

A block must not be released while a batch or a transfer may still touch it: ``core.residency`` keeps the blocks of a
request until all that names it has been acknowledged.
"""

from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: list[int] = []  # a stack of those that were given back
        self._refs: list[int] = []  # of all blocks that were ever taken; ids ascend as they are taken first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free) + self.num_blocks - len(self._refs)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that ``allocate`` can give: free ones, then cached ones."""
        return self.num_free + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def refs(self, block: int) -> int:
        return self._refs[block] if block < len(self._refs) else 0

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks, each with one reference. The caller has checked ``num_available``."""
        assert count <= self.num_available, "allocate asks for more than is available"
        left = max(0, len(self._free) - count)
        blocks = self._free[: left - 1 if left else None : -1]
        del self._free[left:]
        for block in blocks:
            self._refs[block] = 1
        first = len(self._refs)
        new = min(count - len(blocks), self.num_blocks - first)
        blocks += range(first, first + new)
        self._refs += [1] * new
        while len(blocks) < count:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def allocate_one(self) -> int | None:
        """As ``allocate`` gives it; None if none is available."""
        if self._free:
            block = self._free.pop()
            self._refs[block] = 1
            return block
        return self.allocate(1)[0] if self.num_available else None

    def lookup(self, key: bytes) -> int | None:
        """The block published under ``key``."""
        return self._block_of.get(key)

    def share(self, block: int) -> None:
        """One more reference to a published block."""
        if self._refs[block] == 0:
            del self._cached[block]
        self._refs[block] += 1

    def publish(self, block: int, key: bytes) -> None:
        """Makes a used, fully computed block shareable. The first block published under a key stays."""
        assert self._refs[block] > 0, "only a used block can be published"
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one reference of each. Of a sequence's blocks the last is given away first: the heads of prefixes
        are worth most."""
        refs, keys, free = self._refs, self._key_of, self._free
        for block in reversed(blocks):
            refs[block] = left = refs[block] - 1
            if not left:
                if block in keys:
                    self._cached[block] = None
                else:
                    free.append(block)
            else:
                assert left > 0, "a block was released more often than taken"

    def clear_cached(self) -> int:
        """Frees every cached block, and forgets the keys of used ones. Returns how many were freed."""
        freed = list(self._cached)
        self._cached.clear()
        self._free.extend(reversed(freed))
        self._key_of.clear()
        self._block_of.clear()
        return len(freed)

    def _forget(self, block: int) -> None:
        del self._block_of[self._key_of.pop(block)]
