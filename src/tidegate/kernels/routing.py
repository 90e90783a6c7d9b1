"""Which experts of a mixture each token goes through."""

import torch


def choose_experts(logits: torch.Tensor, per_token: int, normalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``per_token`` most probable experts of router logits ``[T, E]``, and the share that each has in the sum.

    Shares ``[T, per_token]`` (in the type of the logits) are the experts' probabilities under a softmax over all of
    them (Shazeer et al., arXiv 1701.06538), divided by their sum where ``normalised``. Indices are int64
    ``[T, per_token]``. Shapes and launches depend on shapes only, so a CUDA graph can hold it.
    """
    shares, chosen = logits.softmax(dim=-1, dtype=torch.float32).topk(per_token, dim=-1)
    if normalised:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    return shares.to(logits.dtype), chosen
