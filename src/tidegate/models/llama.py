"""The Llama family: pre-norm decoder blocks of attention with rotary positions, then a gated SiLU MLP or experts.

Covers Llama 2 and 3, SmolLM2, Mistral, Qwen 2 and 2.5, Qwen 3, Mixtral and the Qwens with experts, and DeepSeek V2 and
V3: they differ only in what the spec says, and in which attention and feed-forward part a layer gets by it. A new
family starts as a copy of this file's structure.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch.nn.functional import embedding

from tidegate.base.specs import ModelSpec
from tidegate.kernels.attention import Attention
from tidegate.kernels.collectives import Collectives
from tidegate.kernels.linear import Linear
from tidegate.kernels.ops import ops_for
from tidegate.models.feed_forward import FeedForward, feed_forward
from tidegate.models.linears import linears
from tidegate.models.rope import Rotary
from tidegate.models.self_attention import SelfAttention, self_attention


class _Layer(NamedTuple):
    """One block, its parts named as in ``models.weights``."""

    attn_norm: torch.Tensor
    attention: SelfAttention
    mlp_norm: torch.Tensor
    mlp: FeedForward


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
        collectives: Collectives | None = None,
    ) -> None:
        """``products`` are ``models.linears.linears`` of the weights, where they have been made already. With
        ``collectives`` this is one rank's part of a model, and all ranks run the same steps."""
        products = products or linears(spec, weights)
        self._collectives = collectives
        self._spec = spec
        self._embed = weights["embed"]
        self._layers = [
            _Layer(
                weights[f"layers.{i}.attn_norm"],
                self_attention(spec, weights, products, attention, i),
                weights[f"layers.{i}.mlp_norm"],
                feed_forward(spec, weights, products, i),
            )
            for i in range(spec.num_layers)
        ]
        self._norm = weights["norm"]
        self._lm_head = products["lm_head"]
        self._rotary = Rotary(spec, self._embed.device)
        self._ops = ops_for(self._embed)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See ``models.registry.Model``. Of the last layer, rows that are not wanted leave their keys and values, and
        nothing else is computed of them: of a prompt one row is wanted, so nearly a whole layer less."""
        eps, add_rms_norm = self._spec.norm_eps, self._ops.add_rms_norm
        residual = embedding(tokens, self._embed)
        cos, sin = self._rotary.at(positions, residual.dtype)
        normed = self._ops.rms_norm(residual, self._layers[0].attn_norm, eps)
        next_norms = [layer.attn_norm for layer in self._layers[1:]] + [self._norm]
        for layer, next_norm in zip(self._layers, next_norms, strict=True):
            rows = wanted if layer is self._layers[-1] else None
            attended = layer.attention(normed, cos, sin, rows)
            if rows is not None:
                residual = residual[rows]
                if not len(rows):
                    return residual
            normed = add_rms_norm(residual, self._added(attended), layer.mlp_norm, eps)
            normed = add_rms_norm(residual, self._added(layer.mlp(normed)), next_norm, eps)
        return normed

    def _added(self, output: torch.Tensor) -> torch.Tensor:
        """What the ranks' outputs of a part add up to."""
        return output if self._collectives is None else self._collectives.add(output)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Next-token logits, float32 ``[N, vocab]``, of hidden states ``[N, hidden]``."""
        logits = self._lm_head(hidden)
        if self._collectives is not None:
            logits = self._collectives.columns(logits, self._spec.vocab_size)
        return logits.float()
