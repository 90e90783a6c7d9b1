"""What follows attention in a decoder's block: a gated MLP, or a mixture of experts."""

from collections.abc import Callable, Mapping

import torch
from torch.nn.functional import linear

from tidegate.base.specs import ExpertsSpec, ModelSpec
from tidegate.kernels.linear import Linear
from tidegate.kernels.ops import Ops, ops_for
from tidegate.kernels.torch_experts import ExpertScales

FeedForward = Callable[[torch.Tensor], torch.Tensor]  # [T, hidden] -> a new [T, hidden]


def feed_forward(
    spec: ModelSpec, weights: Mapping[str, torch.Tensor], products: Mapping[str, Linear], layer: int
) -> FeedForward:
    """That of one layer, over weights and products named as in ``models.weights``."""
    prefix, ops, experts = f"layers.{layer}.", ops_for(weights["embed"]), spec.experts_of(layer)
    if experts is None:
        return GatedMlp(products[prefix + "gate_up"], products[prefix + "down"], ops)
    return MixtureOfExperts(experts, spec.hidden_size, weights, products, prefix, ops)


class GatedMlp:
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, gate_up: Linear, down: Linear, ops: Ops) -> None:
        self._gate_up, self._down, self._silu_mul = gate_up, down, ops.silu_mul

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(self._silu_mul(self._gate_up(x)))


class MixtureOfExperts:
    """The weighted sum of a token's experts, each a gated MLP, and of a shared one, where there is one."""

    def __init__(
        self,
        spec: ExpertsSpec,
        hidden_size: int,
        weights: Mapping[str, torch.Tensor],
        products: Mapping[str, Linear],
        prefix: str,
        ops: Ops,
    ) -> None:
        self._spec = spec
        self._router = products[prefix + "router"]
        if spec.exact_router:
            router = weights[prefix + "router"].float()
            self._router = lambda x: linear(x.float(), router)
        self._correction = weights.get(prefix + "correction")
        self._gate_up = weights[prefix + "experts_gate_up"].view(spec.num_experts, 2 * spec.ffn_size, hidden_size)
        self._down = weights[prefix + "experts_down"].view(spec.num_experts, hidden_size, spec.ffn_size)
        self._scales: ExpertScales | None = None
        if prefix + "experts_gate_up_scale" in weights:
            gate_up, down = weights[prefix + "experts_gate_up_scale"], weights[prefix + "experts_down_scale"]
            self._scales = gate_up.view(spec.num_experts, -1), down.view(spec.num_experts, -1)
        self._choose, self._experts = ops.choose_experts, ops.experts
        self._shared: GatedMlp | None = None
        self._shared_router = products.get(prefix + "shared_router")
        if spec.shared_ffn_size:
            self._shared = GatedMlp(products[prefix + "shared_gate_up"], products[prefix + "shared_down"], ops)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        shares, chosen = self._choose(self._router(x), self._spec, self._correction)
        out = self._experts(x, shares, chosen, self._gate_up, self._down, self._scales)
        if self._shared is not None:
            shared = self._shared(x)
            out += shared if self._shared_router is None else shared * self._shared_router(x).sigmoid()
        return out
