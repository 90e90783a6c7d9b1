"""A fake device: it computes no model, but keeps the pool's arrays exactly as a real one would.

Its "KV" of a position is the token at that position, its next token a hash of the tokens that it finds *by way of the
block table*. So whatever goes wrong with blocks (reuse while in use, a wrong share, a stale table, a lost write) shows
as wrong tokens, and ``expected_tokens`` says what is right.
"""

import zlib
from collections.abc import Sequence

import numpy as np

from tidegate.base.batch import Batch, BatchResult, TableUpdate
from tidegate.base.request import RequestSpec
from tidegate.base.specs import PoolSpec


def next_token(context: Sequence[int], vocab_size: int) -> int:
    return zlib.crc32(np.asarray(context, dtype=np.int32).tobytes()) % vocab_size


def expected_tokens(spec: RequestSpec, vocab_size: int) -> list[int]:
    """What the fake device must generate for a request that nobody aborts."""
    context = list(spec.prompt)
    for _ in range(spec.max_tokens):
        context.append(next_token(context, vocab_size))
        if context[-1] in spec.sampling.stop_token_ids:
            break
    return context[len(spec.prompt) :]


class FakeDevice:
    """Runs the batches of all lanes over one pool; ``apply`` at a launch, ``run`` when the batch is to happen."""

    def __init__(self, pool: PoolSpec, vocab_size: int) -> None:
        self.pool = pool
        self.vocab_size = vocab_size
        self.kv = np.full((pool.num_blocks, pool.block_size), -1, dtype=np.int32)
        self.table = np.full((pool.max_num_seqs, pool.max_blocks_per_seq), -1, dtype=np.int32)
        self.tokens = np.full((pool.max_num_seqs, pool.max_model_len + 1), -1, dtype=np.int32)

    def apply(self, updates: Sequence[TableUpdate]) -> None:
        for update in updates:
            self.table[update.slot, update.index : update.index + len(update.blocks)] = update.blocks

    def run(self, batch: Batch, seconds: float) -> BatchResult:
        sampled = []
        for piece in batch.slices:
            end = piece.start + len(piece.tokens)
            self.tokens[piece.slot, piece.start : end] = piece.tokens
            self._write(piece.slot, piece.start, end)
            if piece.sample:
                sampled.append(self._sample(piece.slot, end - 1))
        for slot, position in zip(batch.decode_slots, batch.decode_positions, strict=True):
            self._write(slot, position, position + 1)
            sampled.append(self._sample(slot, position))
        return BatchResult(batch.id, sampled, None, seconds)

    def _write(self, slot: int, start: int, end: int) -> None:
        positions = np.arange(start, end)
        blocks = self.table[slot, positions // self.pool.block_size]
        self.kv[blocks, positions % self.pool.block_size] = self.tokens[slot, start:end]

    def _sample(self, slot: int, position: int) -> int:
        positions = np.arange(position + 1)
        context = self.kv[self.table[slot, positions // self.pool.block_size], positions % self.pool.block_size]
        token = next_token(context.tolist(), self.vocab_size)
        self.tokens[slot, position + 1] = token
        return token
