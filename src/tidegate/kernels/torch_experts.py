"""The experts of a mixture in plain torch, one product for all tokens of an expert. Any device, any float type."""

import torch
from torch.nn.functional import silu

from tidegate.kernels.linear import float_linear

ExpertScales = tuple[torch.Tensor, torch.Tensor]  # of weights in FP8, float32: [E, 2 F] of gate_up, [E, H] of down


def experts(
    x: torch.Tensor,
    shares: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    scales: ExpertScales | None = None,
) -> torch.Tensor:
    """Sends each token of ``x [T, H]`` through its experts and returns the sum ``[T, H]``, weighted by its shares.

    ``shares`` and ``chosen`` (int64) are ``[T, K]``; expert e computes ``down[e] @ (silu(gate) * up)`` where gate and
    up are the halves of ``gate_up[e] @ x``; ``gate_up [E, 2 F, H]``, ``down [E, H, F]``, or with ``scales`` these in
    e4m3, of which each row is multiplied by its scale; tokens are as they come either way. A token's terms are added in
    the order of its experts in ``chosen``, whoever is beside it. Waits for the device, to learn how many tokens each
    expert has.
    """
    tokens, per_token = chosen.shape
    order = chosen.flatten().argsort(stable=True)  # pairs of a token and an expert, an expert's one after another
    counts = chosen.flatten().bincount(minlength=len(gate_up)).tolist()
    rows = x[order // per_token]
    terms = x.new_empty(tokens * per_token, x.shape[1])
    start = 0
    for expert, count in enumerate(counts):
        if count:
            of_expert = slice(start, start + count)
            first, second = gate_up[expert], down[expert]
            if scales is not None:
                first, second = (_floats(w, s[expert], x) for w, s in zip((first, second), scales, strict=True))
            gate, up = float_linear(first, None)(rows[of_expert]).chunk(2, dim=-1)
            terms[order[of_expert]] = float_linear(second, None)(silu(gate).mul_(up))
            start += count
    return (terms.view(tokens, per_token, -1) * shares.unsqueeze(2)).sum(dim=1).to(x.dtype)


def _floats(weight: torch.Tensor, scale: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return weight.float().mul_(scale.unsqueeze(1)).to(like.dtype)
