"""Matrices in FP8 (e4m3): which they are, what lies beside them, and how they get there.

    {matrix} e4m3, of its float shape        {matrix}_scale [rows]
    {matrix}_input_scale [1], where a checkpoint fixes the scale of what the matrix is multiplied with
    layers.{i}.k_scale, .v_scale [1], of a quantised checkpoint: what an FP8 KV cache divides keys and values by

The embedding, ``lm_head`` and routers stay as they are, and so do matrices that the GPU's product does not take. An
expert's matrices are multiplied with inputs that are not quantised: there it is reading them that takes time.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

import torch

from tidegate.base.errors import ModelError
from tidegate.base.specs import ModelSpec
from tidegate.kernels.fp8 import KvScales, quantise_rows, unit_scales
from tidegate.kernels.fp8_linear import MULTIPLE
from tidegate.models.fp8_checkpoint import is_kept
from tidegate.models.matrices import expert_matrices, matrices
from tidegate.models.weights import Part, layout, parts

_ROUNDED_AT_A_TIME = 1 << 26  # elements, of which there are two float32 copies meanwhile
_FLOAT = ("lm_head", "router", "shared_router")
Read = Callable[[str], torch.Tensor | None]  # a checkpoint's tensor by name; None: there is none


def fp8_tensors(spec: ModelSpec) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name to (torch's name of the type, shape) of the matrices, and of all that lies beside them. Raises ModelError
    where a checkpoint's are none that can be multiplied."""
    shapes, experts = layout(spec), set(expert_matrices(spec))
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name in _chosen(spec, shapes):
        found[name] = "float8_e4m3fn", shapes[name]
        found[name + "_scale"] = "float32", shapes[name][:1]
        if spec.fp8 is not None and spec.fp8.static_inputs and name not in experts:
            found[name + "_input_scale"] = "float32", (1,)
    if spec.fp8 is not None:
        for i in range(spec.num_layers):
            found |= {f"layers.{i}.{kind}_scale": ("float32", (1,)) for kind in ("k", "v")}
    return found


def _chosen(spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    stored = _stored_in_fp8(spec) if spec.fp8 is not None else None
    experts = expert_matrices(spec)
    for name in matrices(spec) + experts:
        if name.rpartition(".")[2] in _FLOAT or (stored is not None and name not in stored):
            continue
        fits = name in experts or all(size % MULTIPLE == 0 for size in shapes[name])
        if stored is not None and not fits:
            raise ModelError(f"{name} is in FP8 and of a shape, {shapes[name]}, that is no multiple of {MULTIPLE}.")
        if fits:
            yield name


def _stored_in_fp8(spec: ModelSpec) -> set[str]:
    """The matrices of which a checkpoint stores all parts so."""
    assert spec.fp8 is not None
    found = set()
    for name, its_parts in _parts_of(spec).items():
        kept = {is_kept(_module(spec, part), spec.fp8) for part in its_parts}
        if len(kept) > 1:
            raise ModelError(
                f"Of {', '.join(its_parts)} the checkpoint quantizes some and keeps others; together they are one "
                f"matrix here, so that is not supported."
            )
        if kept == {False}:
            found.add(name)
    return found


def _parts_of(spec: ModelSpec) -> dict[str, dict[str, Part]]:
    wanted = set(matrices(spec) + expert_matrices(spec))
    found: dict[str, dict[str, Part]] = defaultdict(dict)
    for name, part in parts(spec).items():
        if part.tensor in wanted:
            found[part.tensor][name] = part
    return found


def _module(spec: ModelSpec, part: str) -> str:
    from tidegate.models.safetensors_source import hf_name  # which reads scales with what is in this file

    return hf_name(part, spec.architecture).removesuffix(".weight")


def read_scales(spec: ModelSpec, into: Mapping[str, torch.Tensor], read: Read) -> None:
    """Fills the scales of ``fp8_tensors`` from a quantised checkpoint. Raises ModelError for one that it lacks."""
    for name, its_parts in _parts_of(spec).items():
        if name + "_scale" not in into:
            continue
        inputs = []
        for part_name, part in its_parts.items():
            module, rows = _module(spec, part_name), part.shape[0]
            scale = _needed(read, module + ".weight_scale").reshape(-1)
            if len(scale) not in (1, rows):
                raise ModelError(f"{module}.weight_scale has {len(scale)} elements, its weight {rows} rows.")
            into[name + "_scale"].narrow(0, part.start, rows).copy_(scale)
            if name + "_input_scale" in into:
                inputs.append(_needed(read, module + ".input_scale").float().max())
        if inputs:
            into[name + "_input_scale"].copy_(torch.stack(inputs).max())
    for i in range(spec.num_layers):
        for kind in ("k", "v"):
            into[f"layers.{i}.{kind}_scale"].copy_(_kv_scale(read, f"model.layers.{i}.self_attn.", kind))


def _needed(read: Read, name: str) -> torch.Tensor:
    tensor = read(name)
    if tensor is None:
        raise ModelError(f"The checkpoint's matrices are in FP8, and it has no tensor {name!r}.")
    return tensor


def _kv_scale(read: Read, attention: str, kind: str) -> torch.Tensor:
    """By any of the names that there have been for it; 1 where it was not calibrated."""
    for name in (f"{kind}_scale", f"{kind}_proj.{kind}_scale", f"{kind}_proj.output_scale", "kv_scale"):
        scale = read(attention + name)
        if scale is not None and (scale := scale.float().reshape(-1).max()) > 0.0:
            return scale
    return torch.tensor(1.0)


def kv_scales(spec: ModelSpec, weights: Mapping[str, torch.Tensor]) -> KvScales:
    """What keys and values are divided by in an FP8 KV cache."""
    if "layers.0.k_scale" not in weights:
        return unit_scales(spec.num_layers)
    kinds = [[float(weights[f"layers.{i}.{kind}_scale"]) for i in range(spec.num_layers)] for kind in ("k", "v")]
    return tuple(zip(*kinds, strict=True))


class RoundedAsRead(Mapping[str, torch.Tensor]):
    """A model's tensors to be filled in the order of ``models.weights.parts``: a matrix that is to be FP8 is a float
    tensor until the next tensor is asked for, and is rounded then. So no more than one is held as floats."""

    def __init__(self, spec: ModelSpec, into: Mapping[str, torch.Tensor]) -> None:
        self._shapes, self._into = layout(spec), into
        self._open: tuple[str, torch.Tensor] | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        if self._open is not None and self._open[0] != name:
            self.close()
        if name + "_scale" not in self._into:
            return self._into[name]
        if self._open is None:
            like = self._into["embed"]
            self._open = name, torch.empty(self._shapes[name], dtype=like.dtype, device=like.device)
        return self._open[1]

    def close(self) -> None:
        """After the last tensor has been filled."""
        if self._open is not None:
            name, floats = self._open
            count = max(1, _ROUNDED_AT_A_TIME // floats.shape[1])
            for start in range(0, len(floats), count):
                rows = slice(start, start + count)
                self._into[name][rows], self._into[name + "_scale"][rows] = quantise_rows(floats[rows])
            self._open = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)
