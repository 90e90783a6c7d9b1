"""What one launch on a lane computes. Batches name block-table rows and token *slots*, never token values
that are not known yet: the input of a decode row is read from the pool's token store when the batch runs.

A *slot* is a row of the pool's per-request arrays, held by a request from admission to its end:

    token store   int32 [max_num_seqs, max_model_len + 1]   tokens[slot, p] is the token at position p
    block table   int32 [max_num_seqs, max_blocks_per_seq]  block of positions [i*block_size, (i+1)*block_size)

The block table is written by the node for the core (``Batch.tables``); lanes only read it. The token store is
written by lanes: a slice stores its tokens, sampling stores token p+1 after computing position p.
"""

import msgspec

from tidegate.base.request import SamplingParams, TokenLogprob


class Slice(msgspec.Struct, array_like=True, frozen=True):
    """A range of one prompt's tokens: positions ``start`` to ``start + len(tokens) - 1``.

    ``sample``: the slice reaches the last known token, so the next one is sampled from it.
    ``history``: tokens at positions 0 to start-1, given when sampling needs them and a prefix hit skipped them.
    """

    slot: int
    start: int
    tokens: list[int]
    sample: bool
    history: list[int] | None = None


class SlotSetup(msgspec.Struct, array_like=True, frozen=True):
    """Tells a lane how to sample for a slot, before the first batch in which that lane sees the request."""

    slot: int
    prompt_len: int  # tokens given by the user; later ones count as output for penalties and min_tokens
    sampling: SamplingParams


class TableUpdate(msgspec.Struct, array_like=True, frozen=True):
    """Entries ``index`` to ``index + len(blocks) - 1`` of a slot's block-table row."""

    slot: int
    index: int
    blocks: list[int]


class Batch(msgspec.Struct, array_like=True):
    """Rows in order: all slices, then all decodes. Sampled tokens come back in that order
    (slices with ``sample`` set, then every decode row)."""

    id: int
    share: float  # of the device's compute that it runs on; 1.0 is the whole device
    slices: list[Slice]
    decode_slots: list[int]
    decode_positions: list[int]  # position of each decode row's input token
    tables: list[TableUpdate]
    setups: list[SlotSetup]
    fused: bool = False  # attention of slices and decodes may run in one kernel; the results are the same
    expected_s: float = 0.0  # that it is believed to take on the device; 0: nobody knows

    @property
    def hybrid(self) -> bool:
        return bool(self.slices and self.decode_slots)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(len(s.tokens) for s in self.slices)

    @property
    def num_sampled(self) -> int:
        return sum(s.sample for s in self.slices) + len(self.decode_slots)


class BatchResult(msgspec.Struct, array_like=True):
    """What a lane answers: one token a sampled row, in order."""

    id: int
    tokens: list[int]
    logprobs: list[TokenLogprob | None] | None  # one a sampled row, or None where no row asked
    seconds: float  # time on the device
