"""The Llama family: pre-norm decoder blocks with grouped-query attention, rotary positions and a gated SiLU MLP.

Covers Llama 2 and 3, SmolLM2, Mistral, Qwen 2 and 2.5, Qwen 3, and Mixtral and the Qwens with experts: they differ
only in what the spec says (biases, norms of q and k, windows, rotary scaling, experts). A new family starts as a copy
of this file's structure.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import embedding

from tidegate.base.specs import ModelSpec
from tidegate.kernels.attention import Attention
from tidegate.kernels.linear import Linear
from tidegate.kernels.ops import ops_for
from tidegate.models.feed_forward import FeedForward, feed_forward
from tidegate.models.linears import linears
from tidegate.models.rope import Rotary


@dataclass(frozen=True)
class _Layer:
    """One block, its parts named as in ``models.weights``; None where the family has no such tensor."""

    attn_norm: torch.Tensor
    qkv: Linear
    o: Linear
    mlp_norm: torch.Tensor
    mlp: FeedForward
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None

    @classmethod
    def of(
        cls, spec: ModelSpec, weights: Mapping[str, torch.Tensor], products: Mapping[str, Linear], index: int
    ) -> "_Layer":
        prefix = f"layers.{index}."
        return cls(
            attn_norm=weights[prefix + "attn_norm"],
            qkv=products[prefix + "qkv"],
            o=products[prefix + "o"],
            mlp_norm=weights[prefix + "mlp_norm"],
            mlp=feed_forward(spec, weights, products, index),
            q_norm=weights.get(prefix + "q_norm"),
            k_norm=weights.get(prefix + "k_norm"),
        )


class Llama:
    """A decoder over weights that somebody else owns. Call under ``torch.inference_mode``.

    The caller plans a step's rows with ``attention.plan`` first, then runs ``forward`` on the same rows.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, torch.Tensor],
        attention: Attention,
        products: Mapping[str, Linear] | None = None,
    ) -> None:
        """``products`` are ``models.linears.linears`` of the weights, where they have been made already."""
        products = products or linears(spec, weights)
        self._spec = spec
        self._attention = attention
        self._embed = weights["embed"]
        self._layers = [_Layer.of(spec, weights, products, i) for i in range(spec.num_layers)]
        self._norm = weights["norm"]
        self._lm_head = products["lm_head"]
        self._rotary = Rotary(spec, self._embed.device)
        self._ops = ops_for(self._embed)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states after the final norm, ``[T, hidden]``, for token ids and positions ``[T]``."""
        eps, add_rms_norm = self._spec.norm_eps, self._ops.add_rms_norm
        residual = embedding(tokens, self._embed)
        cos, sin = self._rotary.at(positions, residual.dtype)
        normed = self._ops.rms_norm(residual, self._layers[0].attn_norm, eps)
        next_norms = [layer.attn_norm for layer in self._layers[1:]] + [self._norm]
        for index, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            attended = self._attend(index, layer, normed, cos, sin)
            normed = add_rms_norm(residual, attended, layer.mlp_norm, eps)
            normed = add_rms_norm(residual, layer.mlp(normed), next_norm, eps)
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Next-token logits, float32 ``[N, vocab]``, of hidden states ``[N, hidden]``."""
        return self._lm_head(hidden).float()

    def _attend(self, index: int, layer: _Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        spec, ops = self._spec, self._ops
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        qkv = layer.qkv(x).view(-1, heads + 2 * kv_heads, spec.head_dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk[:, :heads], qk[:, heads:]
            qk = torch.cat(
                (ops.rms_norm(q, layer.q_norm, spec.norm_eps), ops.rms_norm(k, layer.k_norm, spec.norm_eps)), dim=1
            )
        qk = ops.rope(qk, cos, sin)
        attended = self._attention.run(index, qk[:, :heads], qk[:, heads:], v)
        return layer.o(attended.view(-1, heads * spec.head_dim))
