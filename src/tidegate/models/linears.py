"""A model's matrices, ready to be multiplied with: float as they lie, or quantised to int8 or FP8.

Quantised to int8, the matrices lie in memory as int8, each with a float32 scale a row beside it ("layers.0.qkv_scale");
the embedding stays float, since its rows are looked up, so a tied ``lm_head`` becomes a tensor of its own. Before that,
all weights are turned so that they round well (``models.rotation``). For FP8 see ``models.fp8_weights``.
"""

import math
from collections.abc import Callable, Mapping

import torch

from tidegate.base.errors import ModelError
from tidegate.base.specs import ModelSpec, Shard
from tidegate.kernels.fp8_linear import fp8_linear
from tidegate.kernels.linear import Linear, float_linear
from tidegate.models.fp8_weights import RoundedAsRead, fp8_tensors
from tidegate.models.matrices import float_name, matrices
from tidegate.models.rotation import rotate
from tidegate.models.sources import ModelSource
from tidegate.models.weights import WHOLE, layout

QUANTIZATIONS = ("int8", "fp8")


def stored(spec: ModelSpec, quantization: str | None, dtype: str = "float32") -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name to (torch's name of the type, shape) of every tensor that the model is computed from; ``dtype`` is that of
    what is not quantised. A checkpoint in FP8 stays that, whether it is asked for or not."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {name: (dtype, shape) for name, shape in layout(spec).items()}
    quantization = _agreed(spec, quantization)
    if quantization is None:
        return shapes
    if quantization == "fp8":
        return shapes | fp8_tensors(spec)
    for name in matrices(spec):
        _, shape = shapes[float_name(spec, name)]
        shapes[name] = ("int8", shape)
        shapes[name + "_scale"] = ("float32", shape[:1])
    return shapes


def _agreed(spec: ModelSpec, asked: str | None) -> str | None:
    """Raises ModelError for what can't be."""
    if asked is not None and asked not in QUANTIZATIONS:
        raise ModelError(f"Quantization {asked!r} is unknown; choose from {', '.join(QUANTIZATIONS)}.")
    if spec.fp8 is not None:
        if asked not in (None, "fp8"):
            raise ModelError(f"The model's matrices are stored in FP8: it can't be quantized to {asked}.")
        if spec.latent is not None:
            raise ModelError(f"Checkpoints of {spec.architecture} in FP8 are not supported: latent attention is not.")
        asked = "fp8"
    if asked is not None and spec.shard.ranks > 1:
        raise ModelError(f"Quantization {asked!r} is not supported with --tensor-parallel-size over 1.")
    if asked is not None and spec.transformers_config is not None:
        raise ModelError(f"Quantization {asked!r} is not supported for {spec.architecture}: only Llama's layers are.")
    if asked == "int8" and (spec.experts is not None or spec.latent is not None):
        reason = "only Llama's layers are" if spec.experts is None else "mixtures of experts are not"
        raise ModelError(f"Quantization {asked!r} is not supported for {spec.architecture}: {reason} so far.")
    return asked


def stored_bytes(spec: ModelSpec, quantization: str | None, dtype: str = "float32") -> int:
    tensors = stored(spec, quantization, dtype).values()
    return sum(math.prod(shape) * int(getattr(torch, kind).itemsize) for kind, shape in tensors)


def load(
    source: ModelSource,
    into: Mapping[str, torch.Tensor],
    progress: Callable[[float], None] = lambda fraction: None,
    shard: Shard = WHOLE,
) -> None:
    """Fills the tensors of ``stored`` in place, with a rank's part of the model. Quantising to int8 holds all matrices
    as float32 meanwhile, to FP8 one as ``into["embed"]`` is."""
    spec = source.spec
    quantised = [name for name in matrices(spec) if name + "_scale" in into]
    if not quantised or spec.fp8 is not None:
        source.load(into, progress, shard)
        return
    if into[quantised[0]].dtype != torch.int8:
        rounded = RoundedAsRead(spec, into)
        source.load(rounded, progress)
        rounded.close()
        return
    from tidegate.kernels.int8_linear import quantise_rows, take_spread_inputs

    floats = {name: torch.empty(shape) if name in quantised else into[name] for name, shape in layout(spec).items()}
    source.load(floats, progress)
    if spec.tied_embeddings:
        floats["lm_head"] = floats["embed"].clone()
    rotate(spec, floats)
    for name in quantised:
        matrix = floats.pop(name)
        if _spread(name):
            take_spread_inputs(matrix)
        levels, scale = quantise_rows(matrix)
        into[name].copy_(levels)
        into[name + "_scale"].copy_(scale)


def linears(spec: ModelSpec, weights: Mapping[str, torch.Tensor]) -> dict[str, Linear]:
    """The products with each of ``matrices``, biases included, by name. Packs int8 matrices; copies no others."""
    return {name: _linear(spec, weights, name) for name in matrices(spec)}


def _linear(spec: ModelSpec, weights: Mapping[str, torch.Tensor], name: str) -> Linear:
    bias = weights.get(name + "_bias")
    scale = weights.get(name + "_scale")
    if scale is None:
        matrix = weights[float_name(spec, name)]
        if matrix is weights["embed"]:
            matrix = matrix[spec.head_rows.start : spec.head_rows.stop]
        return float_linear(matrix, bias)
    if weights[name].dtype != torch.int8:
        return fp8_linear(weights[name], scale, weights.get(name + "_input_scale"), bias)
    from tidegate.kernels.int8_linear import Int8Linear

    return Int8Linear(weights[name], scale, bias, _spread(name))


def _spread(name: str) -> bool:
    """Whether an int8 matrix takes spread inputs. Those of ``down`` are products of two outputs and have outliers;
    rounding them costs more accuracy than all else together. The others are turned with the stream, or have few."""
    return name.endswith(".down")
