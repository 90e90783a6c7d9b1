"""The Llama family: pre-norm decoder blocks with grouped-query attention, rotary positions and a gated SiLU MLP.

Covers Llama 2 and 3, SmolLM2, Mistral, Qwen 2 and 2.5, and Qwen 3: they differ only in what the spec says
(biases, norms of q and k, windows, rotary scaling). A new family starts as a copy of this file's structure.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import embedding, linear

from tidegate.base.specs import ModelSpec
from tidegate.kernels.attention import Attention
from tidegate.kernels.ops import add_rms_norm, rms_norm, rope_, silu_mul
from tidegate.models.rope import Rotary


@dataclass(frozen=True)
class _Layer:
    """One block's weights, named and shaped as in ``models.weights``; None where the family has no such tensor."""

    attn_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    qkv_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    @classmethod
    def of(cls, weights: dict[str, torch.Tensor], index: int) -> "_Layer":
        prefix = f"layers.{index}."
        return cls(**{name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)})


class Llama:
    """A decoder over weights that somebody else owns. Call under ``torch.inference_mode``.

    The caller plans a step's rows with ``attention.plan`` first, then runs ``forward`` on the same rows.
    """

    def __init__(self, spec: ModelSpec, weights: dict[str, torch.Tensor], attention: Attention) -> None:
        self._spec = spec
        self._attention = attention
        self._embed = weights["embed"]
        self._layers = [_Layer.of(weights, i) for i in range(spec.num_layers)]
        self._norm = weights["norm"]
        self._lm_head = weights["embed"] if spec.tied_embeddings else weights["lm_head"]
        self._rotary = Rotary(spec, self._embed.device)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states after the final norm, ``[T, hidden]``, for token ids and positions ``[T]``."""
        eps = self._spec.norm_eps
        residual = embedding(tokens, self._embed)
        cos, sin = self._rotary.at(positions, residual.dtype)
        normed = rms_norm(residual, self._layers[0].attn_norm, eps)
        next_norms = [layer.attn_norm for layer in self._layers[1:]] + [self._norm]
        for index, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            attended = self._attend(index, layer, normed, cos, sin)
            normed = add_rms_norm(attended, residual, layer.mlp_norm, eps)
            normed = add_rms_norm(self._mlp(layer, normed), residual, next_norm, eps)
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Next-token logits, float32 ``[N, vocab]``, of hidden states ``[N, hidden]``."""
        return linear(hidden, self._lm_head).float()

    def _attend(self, index: int, layer: _Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        spec = self._spec
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        qkv = linear(x, layer.qkv, layer.qkv_bias).view(-1, heads + 2 * kv_heads, spec.head_dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk[:, :heads], qk[:, heads:]
            qk = torch.cat((rms_norm(q, layer.q_norm, spec.norm_eps), rms_norm(k, layer.k_norm, spec.norm_eps)), dim=1)
        qk = rope_(qk, cos, sin)
        attended = self._attention.run(index, qk[:, :heads], qk[:, heads:], v)
        return linear(attended.reshape(-1, heads * spec.head_dim), layer.o, layer.o_bias)

    def _mlp(self, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        gated = silu_mul(linear(x, layer.gate_up, layer.gate_up_bias))
        return linear(gated, layer.down, layer.down_bias)
