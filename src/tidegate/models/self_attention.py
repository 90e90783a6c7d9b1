"""Self-attention of one decoder layer: grouped queries over keys and values, or over latent vectors."""

from collections.abc import Mapping
from typing import Protocol

import torch

from tidegate.base.specs import LatentSpec, ModelSpec
from tidegate.kernels.attention import Attention
from tidegate.kernels.linear import Linear
from tidegate.kernels.ops import ops_for


class SelfAttention(Protocol):
    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A new ``[N, hidden]`` of the rows ``wanted`` (int64 [N]), or of all, where none are named: every row of ``x
        [T, hidden]`` leaves its keys and values, whether it is wanted or not."""
        ...


_LATENT_NORM_EPS = 1e-6  # of DeepSeek's inner norms, whatever the configuration says of the others


def self_attention(
    spec: ModelSpec,
    weights: Mapping[str, torch.Tensor],
    products: Mapping[str, Linear],
    attention: Attention,
    layer: int,
) -> SelfAttention:
    """That of one layer, over weights and products named as in ``models.weights``."""
    if spec.latent is None:
        return GroupedQueries(spec, weights, products, attention, layer)
    return LatentQueries(spec, spec.latent, weights, products, attention, layer)


class GroupedQueries:
    """Query heads in groups, each over one head of keys and values (arXiv 2305.13245)."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, torch.Tensor],
        products: Mapping[str, Linear],
        attention: Attention,
        layer: int,
    ) -> None:
        prefix = f"layers.{layer}."
        self._spec, self._layer, self._attention = spec, layer, attention
        self._qkv, self._o = products[prefix + "qkv"], products[prefix + "o"]
        self._q_norm, self._k_norm = weights.get(prefix + "q_norm"), weights.get(prefix + "k_norm")
        self._ops = ops_for(weights["embed"])

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        spec, ops = self._spec, self._ops
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        qkv = self._qkv(x).view(-1, heads + 2 * kv_heads, spec.head_dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if self._q_norm is not None and self._k_norm is not None:
            q, k = qk[:, :heads], qk[:, heads:]
            qk = torch.cat(
                (ops.rms_norm(q, self._q_norm, spec.norm_eps), ops.rms_norm(k, self._k_norm, spec.norm_eps)), dim=1
            )
        qk = ops.rope(qk, cos, sin)
        attended = self._attention.run(self._layer, qk[:, :heads], qk[:, heads:], v)
        attended = attended.view(-1, heads * spec.head_dim)
        return self._o(attended if wanted is None else attended[wanted])


class LatentQueries:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1) in its absorbed form: what makes a head's keys of
    latent vectors is applied to its query instead, and what makes its values to the sum of latent vectors. So all heads
    attend over the same vectors, ``rank + rope_dim`` elements a token."""

    def __init__(
        self,
        spec: ModelSpec,
        latent: LatentSpec,
        weights: Mapping[str, torch.Tensor],
        products: Mapping[str, Linear],
        attention: Attention,
        layer: int,
    ) -> None:
        prefix = f"layers.{layer}."
        self._latent, self._layer, self._attention = latent, layer, attention
        self._heads = spec.num_heads
        self._query: list[Linear] = [
            products[prefix + name] for name in ("q", "q_a", "q_b") if prefix + name in products
        ]
        self._query_norm = weights.get(prefix + "q_a_norm")
        self._kv_a, self._kv_a_norm = products[prefix + "kv_a"], weights[prefix + "kv_a_norm"]
        of_heads = weights[prefix + "kv_b"].view(spec.num_heads, latent.nope_dim + latent.value_dim, latent.rank)
        self._to_keys, self._to_values = of_heads[:, : latent.nope_dim], of_heads[:, latent.nope_dim :]
        self._o = products[prefix + "o"]
        self._ops = ops_for(weights["embed"])
        self._scale = latent.scale / spec.head_dim**-0.5  # over the one that attention applies

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        latent, ops = self._latent, self._ops
        q = self._query[0](x)
        if self._query_norm is not None:
            q = self._query[1](ops.rms_norm(q, self._query_norm, _LATENT_NORM_EPS))
        q = q.view(-1, self._heads, latent.nope_dim + latent.rope_dim).mul_(self._scale)
        q_nope, q_rope = q.split((latent.nope_dim, latent.rope_dim), dim=-1)
        c, k_rope = self._kv_a(x).split((latent.rank, latent.rope_dim), dim=-1)
        turned = ops.rope(torch.cat((q_rope, k_rope.unsqueeze(1)), dim=1), cos, sin)
        absorbed = torch.bmm(q_nope.transpose(0, 1), self._to_keys).transpose(0, 1)
        queries = torch.cat((absorbed, turned[:, :-1]), dim=-1)
        c = ops.rms_norm(c.contiguous(), self._kv_a_norm, _LATENT_NORM_EPS)
        vectors = torch.cat((c.unsqueeze(1), turned[:, -1:]), dim=-1)
        sums = self._attention.run(self._layer, queries, vectors, vectors[..., : latent.rank])
        if wanted is not None:
            sums = sums[wanted]
        values = torch.bmm(sums.transpose(0, 1), self._to_values.transpose(1, 2)).transpose(0, 1)
        return self._o(values.flatten(1))
