"""Which class computes which architecture. A new family is one file and one row here."""

from collections.abc import Callable
from typing import Protocol

import torch

from tidegate.base.errors import ModelError
from tidegate.base.specs import ModelSpec
from tidegate.kernels.attention import Attention
from tidegate.models.llama import Llama


class Model(Protocol):
    """A decoder. Both methods run under ``torch.inference_mode``, after ``attention.plan`` of the step's rows."""

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states ``[T, hidden]``, final norm applied, of token ids and positions ``[T]`` (any int type)."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 ``[N, vocab]`` of hidden states ``[N, hidden]``."""
        ...


MODELS: dict[str, Callable[[ModelSpec, dict[str, torch.Tensor], Attention], Model]] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Llama,
    "Qwen2ForCausalLM": Llama,
    "Qwen3ForCausalLM": Llama,
}


def build_model(spec: ModelSpec, weights: dict[str, torch.Tensor], attention: Attention) -> Model:
    """The model of ``spec`` over ``weights`` (named and shaped by ``models.weights.layout``, not copied)."""
    if spec.architecture not in MODELS:
        raise ModelError(f"Architecture {spec.architecture} is not supported; supported are {', '.join(MODELS)}.")
    return MODELS[spec.architecture](spec, weights, attention)
