"""Tidegate's own names and shapes of a decoder's weights, and how a checkpoint's tensors lie inside them.

Projections that read the same input are one matrix (one product instead of three): rows of ``qkv`` are the query
heads, then the key heads, then the value heads; rows of ``gate_up`` are the gate, then the up projection.

    embed [vocab, hidden]        norm [hidden]        lm_head [vocab, hidden] (absent where tied to ``embed``)
    layers.{i}.attn_norm [hidden]                     layers.{i}.mlp_norm [hidden]
    layers.{i}.qkv [(Hq + 2 Hkv) D, hidden]           layers.{i}.gate_up [2 ffn, hidden]
    layers.{i}.o [hidden, Hq D]                       layers.{i}.down [hidden, ffn]
    layers.{i}.q_norm [D], .k_norm [D]                layers.{i}.{qkv,o,gate_up,down}_bias [rows]
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from tidegate.base.specs import ModelSpec


class Part(NamedTuple):
    """Rows ``start`` to ``start + shape[0] - 1`` of ``tensor``: one tensor of a checkpoint."""

    tensor: str
    start: int
    shape: tuple[int, ...]

    def of(self, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """The view to fill, of ``shape``."""
        return weights[self.tensor].narrow(0, self.start, self.shape[0])


def parts(spec: ModelSpec) -> dict[str, Part]:
    """Every tensor of an unfused checkpoint under a short name ("embed", "layers.0.q", "layers.0.q_bias"), and where
    it goes. A tensor's parts follow each other without gaps."""
    found: dict[str, Part] = {}
    hidden, head_dim, ffn = spec.hidden_size, spec.head_dim, spec.ffn_size
    q_rows, kv_rows = spec.num_heads * head_dim, spec.num_kv_heads * head_dim

    def add(tensor: str, rows: dict[str, int], *columns: int) -> None:
        start = 0
        for part, count in rows.items():
            found[part] = Part(tensor, start, (count, *columns))
            start += count

    add("embed", {"embed": spec.vocab_size}, hidden)
    for i in range(spec.num_layers):
        layer = f"layers.{i}."
        qkv = {layer + "q": q_rows, layer + "k": kv_rows, layer + "v": kv_rows}
        gate_up = {layer + "gate": ffn, layer + "up": ffn}
        o, down = {layer + "o": hidden}, {layer + "down": hidden}
        add(layer + "attn_norm", {layer + "attn_norm": hidden})
        add(layer + "qkv", qkv, hidden)
        add(layer + "o", o, q_rows)
        add(layer + "mlp_norm", {layer + "mlp_norm": hidden})
        add(layer + "gate_up", gate_up, hidden)
        add(layer + "down", down, ffn)
        if spec.qk_norm:
            add(layer + "q_norm", {layer + "q_norm": head_dim})
            add(layer + "k_norm", {layer + "k_norm": head_dim})
        biases = {"qkv": (qkv, spec.qkv_bias), "o": (o, spec.attn_bias)}
        biases |= {"gate_up": (gate_up, spec.mlp_bias), "down": (down, spec.mlp_bias)}
        for name, (rows, present) in biases.items():
            if present:
                add(f"{layer}{name}_bias", {f"{part}_bias": count for part, count in rows.items()})
    add("norm", {"norm": hidden})
    if not spec.tied_embeddings:
        add("lm_head", {"lm_head": spec.vocab_size}, hidden)
    return found


def layout(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name to shape of every tensor that a model of this spec needs, in the order in which they are used."""
    shapes: dict[str, tuple[int, ...]] = {}
    for part in parts(spec).values():
        shapes[part.tensor] = (part.start + part.shape[0], *part.shape[1:])
    return shapes


def fill(
    spec: ModelSpec,
    into: dict[str, torch.Tensor],
    read: Callable[[str, torch.Tensor], None],
    progress: Callable[[float], None],
) -> None:
    """Calls ``read(part, view)`` for every part, in order, to fill its view in place; reports the fraction done."""
    for name, shape in layout(spec).items():
        assert tuple(into[name].shape) == shape, f"{name} is {tuple(into[name].shape)}, its layout says {shape}"
    wanted = parts(spec)
    total, done = sum(math.prod(part.shape) for part in wanted.values()), 0
    for name, part in wanted.items():
        read(name, part.of(into))
        done += math.prod(part.shape)
        progress(done / total)
