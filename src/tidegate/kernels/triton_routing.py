"""Which experts of a mixture each token goes through, in one kernel."""

import torch
import triton
import triton.language as tl

from tidegate.base.specs import ExpertsSpec
from tidegate.kernels import routing


@triton.jit
def _choose_kernel(
    logits, correction, shares, chosen, num_experts, scale, SIGMOID: tl.constexpr, CORRECTED: tl.constexpr,
    NORMALISED: tl.constexpr, PER_TOKEN: tl.constexpr, PICKS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """One token. PICKS and EXPERTS are powers of 2 that hold PER_TOKEN and ``num_experts``."""
    token = tl.program_id(0).to(tl.int64)
    expert, pick = tl.arange(0, EXPERTS), tl.arange(0, PICKS)
    inside = expert < num_experts
    logit = tl.load(logits + token * num_experts + expert, mask=inside, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logit))
    else:
        scores = tl.exp(logit - tl.max(logit, 0))
        scores /= tl.sum(scores, 0)
    scores = tl.where(scores == scores, scores, 0.0)  # padding may be anything; its experts must be some that there are
    ranked = scores
    if CORRECTED:
        ranked += tl.load(correction + expert, mask=inside, other=0.0).to(tl.float32)
    ranked = tl.where(inside, ranked, float("-inf"))
    picked = tl.zeros([PICKS], dtype=tl.int32)
    values = tl.zeros([PICKS], dtype=tl.float32)
    for i in tl.static_range(PER_TOKEN):
        best = tl.argmax(ranked, 0)
        picked = tl.where(pick == i, best, picked)
        values = tl.where(pick == i, tl.sum(tl.where(expert == best, scores, 0.0), 0), values)
        ranked = tl.where(expert == best, float("-inf"), ranked)
    if NORMALISED:
        values /= tl.sum(values, 0)
    place = token * PER_TOKEN + pick
    tl.store(shares + place, (values * scale).to(shares.dtype.element_ty), mask=pick < PER_TOKEN)
    tl.store(chosen + place, picked.to(tl.int64), mask=pick < PER_TOKEN)


def choose_experts(
    logits: torch.Tensor, spec: ExpertsSpec, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``routing.choose_experts``; of contiguous logits. Of several equal experts the first is taken."""
    if spec.groups > 1:
        return routing.choose_experts(logits, spec, correction)
    tokens, per_token = logits.shape[0], spec.per_token
    shares = torch.empty((tokens, per_token), dtype=logits.dtype, device=logits.device)
    chosen = torch.empty((tokens, per_token), dtype=torch.int64, device=logits.device)
    _choose_kernel[(tokens,)](
        logits, logits if correction is None else correction, shares, chosen, spec.num_experts, spec.scale,
        SIGMOID=spec.scores == "sigmoid", CORRECTED=correction is not None, NORMALISED=spec.normalised,
        PER_TOKEN=per_token, PICKS=triton.next_power_of_2(per_token),
        EXPERTS=triton.next_power_of_2(spec.num_experts), num_warps=1,
    )  # fmt: skip
    return shares, chosen
