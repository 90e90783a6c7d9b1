"""Who is on the device: slots and blocks, given on admission, grown while decoding, taken back at the end.

All allocation happens here, in the core's thread, so it is atomic. Memory of a request is returned only when nothing
in flight names it (``Request.in_flight`` is 0).
"""

from tidegate.core.config import CoreConfig
from tidegate.core.request import Request
from tidegate.kv.blocks import BlockPool
from tidegate.kv.prefix import PrefixHasher


class Residency:
    def __init__(self, config: CoreConfig) -> None:
        self.blocks = BlockPool(config.num_blocks)
        self.block_size = config.block_size
        self._slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._max_slots = config.max_num_seqs
        self._hasher = PrefixHasher(config.block_size, config.prefix_secret) if config.prefix_caching else None
        self._watermark = config.num_blocks // 100  # left for running requests to grow into
        self.queried_tokens = 0
        self.hit_tokens = 0

    @property
    def num_resident(self) -> int:
        return self._max_slots - len(self._slots)

    def admit(self, request: Request) -> bool:
        """Gives a waiting request a slot and blocks for all its tokens and the next one; False if they are not there.

        ``launched`` and ``done`` start after the longest cached prefix. At least one token is left to compute, since
        the next one is sampled from it.
        """
        if not self._slots:
            return False
        hits = self._match(request)
        needed = len(request.tokens) // self.block_size + 1 - len(hits)
        spare = self._watermark if self.num_resident else 0
        for block in hits:
            self.blocks.share(block)
        if needed + spare > self.blocks.num_available:
            self.blocks.release(hits)
            return False
        request.slot = self._slots.pop()
        request.blocks = hits + self.blocks.allocate(needed)
        request.capacity = len(request.blocks) * self.block_size
        request.launched = request.done = request.skipped = len(hits) * self.block_size
        self.queried_tokens += len(request.tokens)
        self.hit_tokens += request.skipped
        if not request.reported:
            request.cached_tokens = request.skipped
        return True

    def cached_tokens(self, request: Request) -> int:
        """Of a waiting request, how many would be found in the prefix cache now."""
        return len(self._match(request)) * self.block_size

    def grow(self, request: Request) -> bool:
        """One more block; False if there is none."""
        block = self.blocks.allocate_one()
        if block is None:
            return False
        request.blocks.append(block)
        request.capacity += self.block_size
        return True

    def publish(self, request: Request, first_block: int, end_block: int) -> None:
        """Lets others share blocks ``first_block`` to ``end_block - 1`` of the request: computed and acknowledged."""
        if self._hasher is None:
            return
        self._hasher.extend(request.chain, request.tokens, end_block)
        for i in range(first_block, end_block):
            self.blocks.publish(request.blocks[i], request.chain[i + 1])

    def publish_decoded(self, request: Request) -> None:
        """Lets others share what was computed while decoding: all acknowledged tokens but the last. Done when a request
        leaves, not block by block, so that no step has to hash for everybody who fills a block in it."""
        computed = len(request.tokens) - 1
        self.publish(request, request.done // self.block_size, computed // self.block_size)

    def release(self, request: Request) -> None:
        assert request.in_flight == 0, "memory was released under a batch in flight"
        if request.slot >= 0:
            self.blocks.release(request.blocks)
            self._slots.append(request.slot)
            request.slot = -1
            request.blocks = []

    def _match(self, request: Request) -> list[int]:
        if self._hasher is None:
            return []
        if not request.chain:
            request.chain.append(self._hasher.root(request.spec.cache_salt))
        usable = (len(request.tokens) - 1) // self.block_size
        hits: list[int] = []
        for i in range(usable):
            if len(request.chain) < i + 2:
                self._hasher.extend(request.chain, request.tokens, i + 1)
            block = self.blocks.lookup(request.chain[i + 1])
            if block is None:
                break
            hits.append(block)
        return hits
