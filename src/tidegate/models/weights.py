"""Tidegate's own names and shapes of a decoder's weights, and how a checkpoint's tensors lie inside them.

Projections that read the same input are one matrix (one product instead of three): rows of ``qkv`` are the query
heads, then the key heads, then the value heads; rows of ``gate_up`` are the gate, then the up projection.

    embed [vocab, hidden]        norm [hidden]        lm_head [vocab, hidden] (absent where tied to ``embed``)
    layers.{i}.attn_norm [hidden]                     layers.{i}.mlp_norm [hidden]
    layers.{i}.qkv [(Hq + 2 Hkv) D, hidden]           layers.{i}.gate_up [2 ffn, hidden]
    layers.{i}.o [hidden, Hq D]                       layers.{i}.down [hidden, ffn]
    layers.{i}.q_norm [D], .k_norm [D]                layers.{i}.{qkv,o,gate_up,down}_bias [rows]

A layer with E experts of size F has these in the place of ``gate_up`` and ``down``, one expert's rows after another's:

    layers.{i}.router [E, hidden]                     layers.{i}.shared_router [1, hidden]
    layers.{i}.experts_gate_up [E 2 F, hidden]        layers.{i}.shared_gate_up [2 shared ffn, hidden]
    layers.{i}.experts_down [E hidden, F]             layers.{i}.shared_down [hidden, shared ffn]
    layers.{i}.correction [E]

With latent attention (``base.specs.LatentSpec``), in the place of ``qkv``, rows of each head one after another:

    layers.{i}.q [Hq (nope + rope), hidden]           layers.{i}.kv_a [rank + rope, hidden], .kv_a_norm [rank]
    or .q_a [query rank, hidden], .q_a_norm           layers.{i}.kv_b [Hq (nope + value), rank]
    and .q_b [Hq (nope + rope), query rank]           layers.{i}.{q_a,kv_a}_bias [rows]

A model that transformers' modules compute has their names and shapes. One rank's part of a model has the names of the
whole, and the shapes that its own spec gives (``models.shards``).
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from tidegate.base.specs import ExpertsSpec, LatentSpec, ModelSpec, Shard
from tidegate.models.shards import Cut, added_once, cut, divide

Read = Callable[[str, torch.Tensor, Cut], None]
WHOLE = Shard()


class Part(NamedTuple):
    """Rows ``start`` to ``start + shape[0] - 1`` of ``tensor``, or all of it if it is a single number: one tensor of a
    checkpoint."""

    tensor: str
    start: int
    shape: tuple[int, ...]

    def of(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The view to fill, of ``shape``."""
        whole = weights[self.tensor]
        return whole.narrow(0, self.start, self.shape[0]) if self.shape else whole


def parts(spec: ModelSpec) -> dict[str, Part]:
    """Every tensor of an unfused checkpoint under a short name ("embed", "layers.0.q", "layers.0.q_bias"), and where
    it goes. A tensor's parts follow each other without gaps."""
    if spec.transformers_config is not None:
        from tidegate.models.transformers_fallback import tensor_shapes

        return {name: Part(name, 0, shape) for name, shape in tensor_shapes(spec).items()}
    found: dict[str, Part] = {}
    hidden = spec.hidden_size

    def add(tensor: str, rows: dict[str, int], *columns: int) -> None:
        start = 0
        for part, count in rows.items():
            found[part] = Part(tensor, start, (count, *columns))
            start += count

    add("embed", {"embed": spec.vocab_size}, hidden)
    for i in range(spec.num_layers):
        layer = f"layers.{i}."
        add(layer + "attn_norm", {layer + "attn_norm": hidden})
        if spec.latent is None:
            _add_attention(add, layer, spec)
        else:
            _add_latent_attention(add, layer, spec, spec.latent)
        add(layer + "mlp_norm", {layer + "mlp_norm": hidden})
        experts = spec.experts_of(i)
        if experts is None:
            gate_up, down = {layer + "gate": spec.ffn_size, layer + "up": spec.ffn_size}, {layer + "down": hidden}
            add(layer + "gate_up", gate_up, hidden)
            add(layer + "down", down, spec.ffn_size)
            if spec.mlp_bias:
                add(layer + "gate_up_bias", _biases(gate_up))
                add(layer + "down_bias", _biases(down))
        else:
            _add_experts(add, layer, hidden, experts)
    add("norm", {"norm": hidden})
    if not spec.tied_embeddings:
        add("lm_head", {"lm_head": len(spec.head_rows)}, hidden)
    return found


def _add_attention(add: Callable[..., None], layer: str, spec: ModelSpec) -> None:
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    qkv, o = {layer + "q": q_rows, layer + "k": kv_rows, layer + "v": kv_rows}, {layer + "o": spec.hidden_size}
    add(layer + "qkv", qkv, spec.hidden_size)
    add(layer + "o", o, q_rows)
    if spec.qk_norm:
        add(layer + "q_norm", {layer + "q_norm": spec.head_dim})
        add(layer + "k_norm", {layer + "k_norm": spec.head_dim})
    if spec.qkv_bias:
        add(layer + "qkv_bias", _biases(qkv))
    if spec.attn_bias:
        add(layer + "o_bias", _biases(o))


def _add_latent_attention(add: Callable[..., None], layer: str, spec: ModelSpec, latent: LatentSpec) -> None:
    q_rows = spec.num_heads * (latent.nope_dim + latent.rope_dim)
    latents = {"kv_a": latent.rank + latent.rope_dim}
    if latent.query_rank is None:
        add(layer + "q", {layer + "q": q_rows}, spec.hidden_size)
    else:
        latents["q_a"] = latent.query_rank
        add(layer + "q_a_norm", {layer + "q_a_norm": latent.query_rank})
        add(layer + "q_b", {layer + "q_b": q_rows}, latent.query_rank)
    for name, rows in latents.items():
        add(layer + name, {layer + name: rows}, spec.hidden_size)
        if spec.qkv_bias:
            add(f"{layer}{name}_bias", {f"{layer}{name}_bias": rows})
    add(layer + "kv_a_norm", {layer + "kv_a_norm": latent.rank})
    add(layer + "kv_b", {layer + "kv_b": spec.num_heads * (latent.nope_dim + latent.value_dim)}, latent.rank)
    add(layer + "o", {layer + "o": spec.hidden_size}, spec.num_heads * latent.value_dim)
    if spec.attn_bias:
        add(layer + "o_bias", {layer + "o_bias": spec.hidden_size})


def _biases(rows: dict[str, int]) -> dict[str, int]:
    return {f"{part}_bias": count for part, count in rows.items()}


def _add_experts(add: Callable[..., None], layer: str, hidden: int, experts: ExpertsSpec) -> None:
    ffn, shared = experts.ffn_size, experts.shared_ffn_size
    every = range(experts.num_experts)
    add(layer + "router", {layer + "router": experts.num_experts}, hidden)
    gate_up = {f"{layer}experts.{e}.{name}": ffn for e in every for name in ("gate", "up")}
    add(layer + "experts_gate_up", gate_up, hidden)
    add(layer + "experts_down", {f"{layer}experts.{e}.down": hidden for e in every}, ffn)
    if experts.scores == "sigmoid":
        add(layer + "correction", {layer + "correction": experts.num_experts})
    if experts.shared_gated:
        add(layer + "shared_router", {layer + "shared_router": 1}, hidden)
    if shared:
        add(layer + "shared_gate_up", {layer + "shared.gate": shared, layer + "shared.up": shared}, hidden)
        add(layer + "shared_down", {layer + "shared.down": hidden}, shared)


def layout(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name to shape of every tensor that a model of this spec needs, in the order in which they are used."""
    shapes: dict[str, tuple[int, ...]] = {}
    for part in parts(spec).values():
        shapes[part.tensor] = (part.start + part.shape[0], *part.shape[1:]) if part.shape else ()
    return shapes


def fill(
    spec: ModelSpec,
    into: Mapping[str, torch.Tensor],
    read: Read,
    progress: Callable[[float], None],
    shard: Shard = WHOLE,
) -> None:
    """Calls ``read(part, view, cut)`` for every part of a rank's share of the model ``spec``, in order, to fill its
    view in place with that cut of the checkpoint's tensor; reports the fraction done. Asks ``into`` for a tensor when
    it comes to it, and for no other before all its parts are filled."""
    own = divide(spec, shard)
    shapes, whole, wanted = layout(own), parts(spec), parts(own)
    total, done = sum(math.prod(part.shape) for part in wanted.values()), 0
    for name, part in wanted.items():
        shape, expected = tuple(into[part.tensor].shape), shapes[part.tensor]
        assert shape == expected, f"{part.tensor} is {shape}, its layout says {expected}"
        if shard.rank and added_once(name):
            part.of(into).zero_()
        else:
            read(name, part.of(into), cut(spec, shard, name, whole[name].shape, part.shape))
        done += math.prod(part.shape)
        progress(done / total)
