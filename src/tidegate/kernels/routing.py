"""Which experts of a mixture each token goes through."""

import torch

from tidegate.base.specs import ExpertsSpec


def choose_experts(
    logits: torch.Tensor, spec: ExpertsSpec, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of highest score for router logits ``[T, E]``, and the share that each has in the sum.

    Scores are probabilities under a softmax over all experts (Shazeer et al., arXiv 1701.06538), or sigmoids, to which
    ``correction [E]`` is added for the choice only (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). Where experts are in
    groups, only those of the best groups are looked at. Shares ``[T, per_token]`` (in the type of the logits) are the
    chosen experts' scores, divided by their sum where ``normalised``, times ``scale``. Indices are int64
    ``[T, per_token]``. Launches depend on shapes only, so a CUDA graph can hold it.
    """
    by_sigmoid = spec.scores == "sigmoid"
    scores = logits.float().sigmoid() if by_sigmoid else logits.softmax(dim=-1, dtype=torch.float32)
    ranked = scores if correction is None else scores + correction
    if spec.groups > 1:
        # A group is as good as its best expert (DeepSeek-V2), or as the sum of its two best (V3).
        in_groups = ranked.unflatten(1, (spec.groups, -1))
        best = in_groups.topk(2, dim=-1).values.sum(dim=-1) if by_sigmoid else in_groups.amax(dim=-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(
            1, best.topk(spec.groups_per_token, dim=-1).indices, True
        )
        ranked = in_groups.masked_fill(~kept.unsqueeze(-1), float("-inf") if by_sigmoid else 0.0).flatten(1)
    shares, chosen = ranked.topk(spec.per_token, dim=-1)
    if correction is not None:
        shares = scores.gather(1, chosen)
    if spec.normalised:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    if spec.scale != 1.0:
        shares = shares * spec.scale
    return shares.to(logits.dtype), chosen
