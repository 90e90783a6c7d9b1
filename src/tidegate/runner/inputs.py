"""From a batch to the flat tensors that a model runs on. Rows lie in the batch's order: slices, then decodes."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from tidegate.base.batch import Batch, TableUpdate
from tidegate.kernels.attention import AttentionRows
from tidegate.kernels.host_copies import to_device


class StepInputs(NamedTuple):
    """T tokens. N of the rows ask for the token that follows their last."""

    tokens: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    rows: AttentionRows
    sampled: torch.Tensor  # int64 [N]: indices into the token axis
    sampled_slots: list[int]
    sampled_positions: list[int]  # those that the sampled tokens will hold


def store_tokens(batch: Batch, token_store: torch.Tensor) -> None:
    """Writes the tokens that come with the batch's slices, and the history before them, into the token store."""
    for piece in batch.slices:
        if piece.history:
            _write(token_store, piece.slot, 0, piece.history)
        _write(token_store, piece.slot, piece.start, piece.tokens)


def build_inputs(batch: Batch, token_store: torch.Tensor) -> StepInputs:
    """Reads every input token from the token store int32 [max_num_seqs, max_model_len + 1]: those of slices must have
    been stored. The tensors are on the store's device."""
    rows = AttentionRows(
        [piece.slot for piece in batch.slices] + batch.decode_slots,
        [piece.start for piece in batch.slices] + batch.decode_positions,
        [len(piece.tokens) for piece in batch.slices] + [1] * len(batch.decode_slots),
    )
    starts, counts = np.array(rows.starts), np.array(rows.counts)
    ends = counts.cumsum()
    positions = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
    asks = np.array([piece.sample for piece in batch.slices] + [True] * len(batch.decode_slots))

    device = token_store.device
    where = to_device(np.stack([np.repeat(np.array(rows.slots), counts), positions]), device)
    return StepInputs(
        tokens=token_store[where[0], where[1]].long(),
        positions=where[1],
        rows=rows,
        sampled=to_device(ends[asks] - 1, device),
        sampled_slots=np.array(rows.slots)[asks].tolist(),
        sampled_positions=(starts + counts)[asks].tolist(),
    )


def apply_tables(table: torch.Tensor, updates: Iterable[TableUpdate]) -> None:
    """Writes a batch's updates into the block table. For the table's one owner, before the batch is launched."""
    for update in updates:
        _write(table, update.slot, update.index, update.blocks)


def _write(array: torch.Tensor, row: int, start: int, values: list[int]) -> None:
    array[row, start : start + len(values)] = to_device(np.array(values, dtype=np.int32), array.device)
