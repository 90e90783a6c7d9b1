"""Which class computes which architecture. A new family is one file and one row here."""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from tidegate.base.errors import ModelError
from tidegate.base.specs import ModelSpec
from tidegate.kernels.attention import Attention
from tidegate.kernels.collectives import Collectives
from tidegate.kernels.linear import Linear
from tidegate.models.llama import Llama


class Model(Protocol):
    """A decoder. Both methods run under ``torch.inference_mode``, after ``attention.plan`` of the step's rows."""

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Hidden states, final norm applied, of token ids and positions ``[T]`` (any int type): ``[N, hidden]`` of the
        rows ``wanted`` (int64 [N], N may be 0), or of all ``T`` where none are named."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 ``[N, vocab]`` of hidden states ``[N, hidden]``."""
        ...


Build = Callable[
    [ModelSpec, Mapping[str, torch.Tensor], Attention, Mapping[str, Linear] | None, Collectives | None], Model
]

MODELS: dict[str, Build] = {
    "DeepseekV2ForCausalLM": Llama,
    "DeepseekV3ForCausalLM": Llama,
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Llama,
    "MixtralForCausalLM": Llama,
    "Qwen2ForCausalLM": Llama,
    "Qwen2MoeForCausalLM": Llama,
    "Qwen3ForCausalLM": Llama,
    "Qwen3MoeForCausalLM": Llama,
}


def build_model(
    spec: ModelSpec,
    weights: Mapping[str, torch.Tensor],
    attention: Attention,
    products: Mapping[str, Linear] | None = None,
    collectives: Collectives | None = None,
) -> Model:
    """The model of ``spec`` over ``weights`` (named and shaped by ``models.linears.stored``, not copied), and over the
    ``products`` with them, where ``models.linears.linears`` has made those already; with ``collectives``, one rank's
    part of it, as ``spec`` says."""
    if spec.transformers_config is not None:
        from tidegate.models.transformers_fallback import TransformersModel

        return TransformersModel(spec, weights, attention, products)
    if spec.architecture not in MODELS:
        raise ModelError(f"Architecture {spec.architecture} is not supported; supported are {', '.join(MODELS)}.")
    return MODELS[spec.architecture](spec, weights, attention, products, collectives)


def prepare(spec: ModelSpec) -> None:
    """Does ahead what building the model would do first, for a process that others are forked from."""
    if spec.transformers_config is not None:
        from tidegate.models.transformers_fallback import skeleton

        skeleton(spec)
