"""A token at random from adjusted logits: temperature, min-p, top-k, top-p, then the inverse of the CDF.

Probabilities are *weights*: exp(logit - best logit), scaled to whole numbers whose sum over the vocabulary stays
below 2**53 and held in float64. Their sums are therefore exact in any order, so a row's token depends neither on how
a device splits its scans nor on its neighbours, and the CDF never decreases and ends at exactly its total.

What is kept is a function of values, never of order: a token tied with the last one kept is kept too.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray

from tidegate.kernels.host_copies import to_device
from tidegate.runner.philox import uniforms
from tidegate.runner.sampling_table import Params


def draw(logits: torch.Tensor, params: Params, positions: NDArray[np.int64]) -> torch.Tensor:
    """One token for each row of ``logits`` float32 [R, V]: int64 [R].

    ``positions`` are those that the tokens will hold. A token less than about V / 2**53 times as likely as the best one
    is never drawn.
    """
    uniform = to_device(uniforms(params["seed"], positions), logits.device)
    return pick(_weights(filtered(logits, params), logits.shape[1]), uniform)


def pick(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The token at which the CDF of ``weights`` [R, V], whole numbers, passes ``uniform`` [R] in [0, 1): int64 [R].

    Never one of weight 0, except for rows with no weight at all or NaN, which get the last token. Overwrites
    ``weights``.
    """
    cumulative = weights.cumsum_(-1)
    # Below the total even after rounding, because 53 bits hold both factors and ``uniform`` is at most 1 - 2**-53.
    target = (uniform * cumulative[:, -1]).floor()
    tokens = torch.searchsorted(cumulative, target.unsqueeze(-1), right=True).squeeze(-1)
    return tokens.clamp_max(weights.shape[1] - 1)


def filtered(logits: torch.Tensor, params: Params) -> torch.Tensor:
    """Logits [R, V] at each row's temperature, shifted so that the best is 0 (nothing can overflow), and -inf for what
    min-p, top-k and top-p leave out, in that order."""
    vocab_size, device = logits.shape[1], logits.device
    best = logits.amax(-1, keepdim=True).clamp_min_(torch.finfo(logits.dtype).min)
    x = (logits - best).div_(_column(params, "temperature", logits).to(logits.dtype))

    at_least = np.flatnonzero(params["min_p"] > 0)
    if at_least.size:
        _cut(x, at_least, to_device(np.log(params["min_p"][at_least]), device).to(x.dtype))
    some = (params["top_k"] > 0) & (params["top_k"] < vocab_size)
    limited, nucleus = np.flatnonzero(some), np.flatnonzero(~some & (params["top_p"] < 1))
    if limited.size:
        _cut(x, limited, _top_k_cutoff(_take(x, limited), params[limited]))
    if nucleus.size:
        _cut(x, nucleus, _top_p_cutoff(_take(x, nucleus), params[nucleus]))
    return x


def _weights(x: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Whole numbers in float64, proportional to exp(x) for x <= 0; those of a vocabulary sum to less than 2**53."""
    bits = 52 - math.ceil(math.log2(vocab_size))
    return x.exp().mul_(2.0**bits).round_().double()


def _take(x: torch.Tensor, rows: NDArray[np.intp]) -> torch.Tensor:
    """The given rows, to be read; not copied where they are all rows."""
    return x if len(rows) == len(x) else x[to_device(rows, x.device)]


def _cut(x: torch.Tensor, rows: NDArray[np.intp], cutoff: torch.Tensor) -> None:
    """Sets to -inf whatever is below ``cutoff`` [len(rows)] in the given rows."""
    limit = torch.full((len(x),), -torch.inf, dtype=x.dtype, device=x.device)
    limit[to_device(rows, x.device)] = cutoff
    x.masked_fill_(x < limit.unsqueeze(-1), -torch.inf)


def _top_k_cutoff(x: torch.Tensor, params: Params) -> torch.Tensor:
    """The value of each row's last token to keep of its ``top_k`` best, of which ``top_p`` may keep fewer."""
    top_k = _column(params, "top_k", x)
    top_p = _column(params, "top_p", x)
    best = x.topk(int(params["top_k"].max())).values
    best.masked_fill_(torch.arange(best.shape[1], device=x.device) >= top_k, -torch.inf)
    kept = torch.where(top_p < 1, _nucleus_size(best, top_p, x.shape[1]), top_k)
    return best.gather(1, kept - 1).squeeze(-1)


def _top_p_cutoff(x: torch.Tensor, params: Params) -> torch.Tensor:
    """The value of each row's last token to keep where only ``top_p`` limits."""
    top_p = _column(params, "top_p", x)
    best = _descending(x)
    return best.gather(1, _nucleus_size(best, top_p, x.shape[1]) - 1).squeeze(-1)


def _nucleus_size(best: torch.Tensor, top_p: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """How many of the values ``best`` [R, K], which descend, have less than ``top_p`` [R, 1] of the weight before them:
    int64 [R, 1], at least 1."""
    weights = _weights(best, vocab_size)
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:].clone()
    return (cumulative.sub_(weights) < top_p * total).sum(-1, keepdim=True).clamp_min_(1)


def _descending(x: torch.Tensor) -> torch.Tensor:
    """Each row sorted. On the CPU numpy's vectorised sort is some thirty times as fast as torch's."""
    if x.device.type == "cpu":
        return torch.from_numpy(np.sort(x.numpy(), axis=-1)).flip(-1)
    return x.sort(-1, descending=True).values


def _column(params: Params, name: str, like: torch.Tensor) -> torch.Tensor:
    """One parameter of every row: [R, 1]."""
    return to_device(params[name].copy(), like.device).unsqueeze(-1)
