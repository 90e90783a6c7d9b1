"""Changes to the logits before a token is chosen: logit bias, min_tokens and penalties, with vLLM's definitions.

Each function changes the rows of ``logits`` float32 [N, V] that ``rows`` names, in place.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from tidegate.kernels.host_copies import to_device
from tidegate.runner.sampling_table import Params, TokenIds

RowIds = NDArray[np.intp]


def add_bias(logits: torch.Tensor, rows: RowIds, bias: list[tuple[TokenIds, NDArray[np.float64]]]) -> None:
    """Adds ``bias[i]``, which is (token ids, values), to row ``rows[i]``."""
    where = _entries(rows, [ids for ids, _ in bias], logits.device)
    values = to_device(np.concatenate([values for _, values in bias]), logits.device)
    logits.index_put_(where, values.to(logits.dtype), accumulate=True)


def bar(logits: torch.Tensor, rows: RowIds, tokens: list[TokenIds]) -> None:
    """Makes ``tokens[i]`` impossible in row ``rows[i]``."""
    logits.index_put_(_entries(rows, tokens, logits.device), logits.new_full((), -torch.inf))


def penalise(logits: torch.Tensor, rows: RowIds, params: Params, history: torch.Tensor, lengths: torch.Tensor) -> None:
    """Penalises the tokens in ``history`` int [R, L], of which row r's first ``lengths[r]`` are its tokens so far.

    Repetition divides positive and multiplies negative logits of all tokens so far; presence and frequency
    subtract, once and for each occurrence, from tokens that were generated. ``params`` are the R rows' parameters.
    """
    device, size = logits.device, (len(rows), logits.shape[1])
    numbers = np.stack([params[name] for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")])
    repetition, presence, frequency = to_device(numbers, device).to(logits.dtype).unsqueeze(-1)
    prompt_lens = to_device(params["prompt_len"].copy(), device)

    index = torch.arange(history.shape[1], device=device)
    known = index < lengths.unsqueeze(-1)
    generated = known & (index >= prompt_lens.unsqueeze(-1))
    # Beyond a row's length lies what earlier owners of its slot left: token 0 stands in for it, with a count of 0.
    tokens = history.long().masked_fill_(~known, 0)
    seen = torch.zeros(size, device=device).scatter_add_(1, tokens, known.float()) > 0
    counts = torch.zeros(size, device=device).scatter_add_(1, tokens, generated.float())

    chosen = to_device(rows, device)
    x = logits[chosen]
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    logits[chosen] = x - frequency * counts - presence * (counts > 0)


def _entries(rows: RowIds, tokens: list[TokenIds], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices into [N, V] of every token of every row."""
    at_rows = np.repeat(rows, [len(ids) for ids in tokens])
    return to_device(at_rows, device), to_device(np.concatenate(tokens), device)
