"""A model's matrices, ready to be multiplied with: float as they lie, or quantised to int8.

Quantised, the matrices lie in memory as int8, each with a float32 scale a row beside it ("layers.0.qkv_scale"); the
embedding stays float, since its rows are looked up, so a tied ``lm_head`` becomes a tensor of its own. Before that, all
weights are turned so that they round well (``models.rotation``).
"""

import math
from collections.abc import Callable, Mapping

import torch

from tidegate.base.errors import ModelError
from tidegate.base.specs import ExpertsSpec, ModelSpec, Shard
from tidegate.kernels.linear import Linear, float_linear
from tidegate.models.rotation import rotate
from tidegate.models.sources import ModelSource
from tidegate.models.weights import WHOLE, layout

QUANTIZATIONS = ("int8",)


def stored(spec: ModelSpec, quantization: str | None) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name to (torch's name of the type, shape) of every tensor that the model is computed from."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {name: ("float32", shape) for name, shape in layout(spec).items()}
    if quantization is None:
        return shapes
    if quantization not in QUANTIZATIONS:
        raise ModelError(f"Quantization {quantization!r} is unknown; choose from {', '.join(QUANTIZATIONS)}.")
    if spec.experts is not None or spec.latent is not None or spec.transformers_config is not None:
        reason = "only Llama's layers are" if spec.experts is None else "mixtures of experts are not"
        raise ModelError(f"Quantization {quantization!r} is not supported for {spec.architecture}: {reason} so far.")
    if spec.shard.ranks > 1:
        raise ModelError(f"Quantization {quantization!r} is not supported with --tensor-parallel-size over 1.")
    for name in matrices(spec):
        _, shape = shapes[_float_name(spec, name)]
        shapes[name] = ("int8", shape)
        shapes[name + "_scale"] = ("float32", shape[:1])
    return shapes


def stored_bytes(spec: ModelSpec, quantization: str | None) -> int:
    return sum(math.prod(shape) * (1 if dtype == "int8" else 4) for dtype, shape in stored(spec, quantization).values())


def matrices(spec: ModelSpec) -> list[str]:
    """The names of all matrices that every token's activations are multiplied with: all but those of experts, and none
    where transformers' modules do it."""
    if spec.transformers_config is not None:
        return []
    names = []
    for i in range(spec.num_layers):
        names += [f"layers.{i}.{name}" for name in _of_attention(spec) + _of_feed_forward(spec.experts_of(i))]
    return [*names, "lm_head"]


def _of_attention(spec: ModelSpec) -> list[str]:
    if spec.latent is None:
        return ["qkv", "o"]
    return (["q"] if spec.latent.query_rank is None else ["q_a", "q_b"]) + ["kv_a", "o"]


def _of_feed_forward(experts: ExpertsSpec | None) -> list[str]:
    if experts is None:
        return ["gate_up", "down"]
    shared = ["shared_gate_up", "shared_down"] if experts.shared_ffn_size else []
    return ["router", *shared, *(["shared_router"] if experts.shared_gated else [])]


def load(
    source: ModelSource,
    into: Mapping[str, torch.Tensor],
    progress: Callable[[float], None] = lambda fraction: None,
    shard: Shard = WHOLE,
) -> None:
    """Fills the tensors of ``stored`` in place, with a rank's part of the model. Quantising holds all matrices as
    float32 meanwhile."""
    spec = source.spec
    quantised = [name for name in matrices(spec) if name + "_scale" in into]
    if not quantised:
        source.load(dict(into), progress, shard)
        return
    from tidegate.kernels.int8_linear import quantise_rows

    floats = {name: torch.empty(shape) if name in quantised else into[name] for name, shape in layout(spec).items()}
    source.load(floats, progress)
    if spec.tied_embeddings:
        floats["lm_head"] = floats["embed"].clone()
    rotate(spec, floats)
    for name in quantised:
        rounded, scale = quantise_rows(floats.pop(name))
        into[name].copy_(rounded)
        into[name + "_scale"].copy_(scale)


def linears(spec: ModelSpec, weights: Mapping[str, torch.Tensor]) -> dict[str, Linear]:
    """The products with each of ``matrices``, biases included, by name. Packs int8 matrices; copies no others."""
    return {name: _linear(spec, weights, name) for name in matrices(spec)}


def _linear(spec: ModelSpec, weights: Mapping[str, torch.Tensor], name: str) -> Linear:
    bias = weights.get(name + "_bias")
    scale = weights.get(name + "_scale")
    if scale is None:
        matrix = weights[_float_name(spec, name)]
        if matrix is weights["embed"]:
            matrix = matrix[spec.head_rows.start : spec.head_rows.stop]
        return float_linear(matrix, bias)
    from tidegate.kernels.int8_linear import Int8Linear

    return Int8Linear(weights[name], scale, bias)


def _float_name(spec: ModelSpec, name: str) -> str:
    return "embed" if name == "lm_head" and spec.tied_embeddings else name
