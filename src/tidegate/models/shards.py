"""Tensor parallelism (Megatron-LM, arXiv 1909.08053): what each of several ranks has of a model.

Query heads are divided in whole groups with their KV heads, feed-forward parts (each expert's too) by their inner
elements, and the rows of ``lm_head`` by token. So ``qkv`` and ``gate_up`` are cut by rows, ``o`` and ``down`` by
columns, and the ranks' outputs of an attention or feed-forward part add up to the model's. Where there are fewer KV
heads than ranks, each rank has a copy of the one that its queries attend to. Norms, routers, the embedding, and what
latent attention computes before its heads part, are the same everywhere.
"""

from typing import NamedTuple

import msgspec

from tidegate.base.errors import ModelError
from tidegate.base.specs import ExpertsSpec, ModelSpec, Shard

_BY_HEADS = ("q", "q_bias", "q_b", "kv_b", "o")
_BY_KV_HEADS = ("k", "k_bias", "v", "v_bias")


class Cut(NamedTuple):
    """Elements ``start`` to ``stop - 1`` along ``axis`` of a checkpoint's tensor of ``shape``."""

    shape: tuple[int, ...]
    axis: int
    start: int
    stop: int

    @property
    def whole(self) -> bool:
        return not self.shape or self.stop - self.start == self.shape[self.axis]


def divide(spec: ModelSpec, shard: Shard) -> ModelSpec:
    """One rank's part of a whole model. Raises ModelError where the model can't be divided among so many."""
    ranks = shard.ranks
    if ranks == 1:
        return spec
    if spec.transformers_config is not None:
        raise ModelError(
            f"--tensor-parallel-size {ranks}: {spec.architecture} is computed by transformers' modules, which are not "
            f"divided; serve it with 1."
        )
    _check_heads(spec, ranks)
    return msgspec.structs.replace(
        spec,
        num_heads=len(_heads(spec, shard)),
        num_kv_heads=len(_kv_heads(spec, shard)),
        ffn_size=_divided(spec, "MLPs", spec.ffn_size, ranks),
        experts=_divide_experts(spec, spec.experts, ranks) if spec.experts else None,
        shard=shard,
    )


def cut(spec: ModelSpec, shard: Shard, part: str, whole: tuple[int, ...], own: tuple[int, ...]) -> Cut:
    """Where a rank's part of shape ``own`` lies in the tensor of shape ``whole``; ``part`` is named as in
    ``models.weights.parts``, ``spec`` is that of the whole model."""
    axis = next((i for i, (all_, ours) in enumerate(zip(whole, own, strict=True)) if all_ != ours), None)
    if axis is None:
        return Cut(whole, 0, 0, whole[0] if whole else 0)
    name = part.rpartition(".")[2]
    if name in _BY_HEADS:
        start = whole[axis] // spec.num_heads * _heads(spec, shard).start
    elif name in _BY_KV_HEADS:
        start = whole[axis] // spec.num_kv_heads * _kv_heads(spec, shard).start
    elif name == "lm_head":
        start = msgspec.structs.replace(spec, shard=shard).head_rows.start
    else:
        start = own[axis] * shard.rank
    return Cut(whole, axis, start, start + own[axis])


def added_once(part: str) -> bool:
    """Whether this is added to what the ranks' outputs add up to: then only one rank may have it."""
    return part.endswith((".o_bias", ".down_bias"))


def _heads(spec: ModelSpec, shard: Shard) -> range:
    """The query heads of a rank."""
    if spec.latent is not None or spec.num_kv_heads < shard.ranks:
        return shard.span(spec.num_heads)
    groups, size = shard.span(spec.num_kv_heads), spec.num_heads // spec.num_kv_heads
    return range(groups.start * size, groups.stop * size)


def _kv_heads(spec: ModelSpec, shard: Shard) -> range:
    if spec.latent is not None:
        return range(1)
    if spec.num_kv_heads >= shard.ranks:
        return shard.span(spec.num_kv_heads)
    of_rank = shard.rank * spec.num_kv_heads // shard.ranks
    return range(of_rank, of_rank + 1)


def _check_heads(spec: ModelSpec, ranks: int) -> None:
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    copied = spec.latent is None and kv_heads < ranks
    if heads < ranks or (copied and (ranks % kv_heads or heads % ranks)):
        reason = f"{heads} heads" if spec.latent else f"{heads} heads over {kv_heads} KV heads"
        raise ModelError(f"--tensor-parallel-size {ranks}: the model's {reason} can't be divided among {ranks} ranks.")


def _divided(spec: ModelSpec, what: str, elements: int, ranks: int) -> int:
    if elements % ranks:
        raise ModelError(
            f"--tensor-parallel-size {ranks}: the {elements} inner elements of {spec.architecture}'s {what} can't be "
            f"divided among {ranks} ranks."
        )
    return elements // ranks


def _divide_experts(spec: ModelSpec, experts: ExpertsSpec, ranks: int) -> ExpertsSpec:
    return msgspec.structs.replace(
        experts,
        ffn_size=_divided(spec, "experts", experts.ffn_size, ranks),
        shared_ffn_size=_divided(spec, "shared experts", experts.shared_ffn_size, ranks),
    )
