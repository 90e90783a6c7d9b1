"""Names for the content of full blocks: keyed, chained hashes of the tokens up to and including the block.

The key of block i is BLAKE2b(secret; key of block i-1, tokens of block i); the chain starts with the request's cache
salt. The secret is drawn at the engine's start, so that nobody can make a prompt that hits another's blocks, and a
match of keys is taken as a match of tokens.
"""

import hashlib
from array import array
from collections.abc import Sequence

DIGEST_BYTES = 16


class PrefixHasher:
    def __init__(self, block_size: int, secret: bytes) -> None:
        self.block_size = block_size
        self._secret = secret

    def root(self, salt: str) -> bytes:
        return hashlib.blake2b(salt.encode(), digest_size=DIGEST_BYTES, key=self._secret, person=b"root").digest()

    def extend(self, chain: list[bytes], tokens: Sequence[int], num_blocks: int) -> None:
        """Makes ``chain`` (the root, then one key a block) cover the first ``num_blocks`` full blocks of ``tokens``."""
        size = self.block_size
        for i in range(len(chain) - 1, num_blocks):
            content = chain[i] + array("i", tokens[i * size : (i + 1) * size]).tobytes()
            chain.append(hashlib.blake2b(content, digest_size=DIGEST_BYTES, key=self._secret).digest())
