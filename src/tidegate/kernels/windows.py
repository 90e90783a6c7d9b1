"""Attention for models whose layers see differently far back."""

from collections.abc import Callable

import msgspec
import torch

from tidegate.base.specs import ModelSpec
from tidegate.kernels.attention import Attention, AttentionRows

Backend = Callable[[ModelSpec, torch.Tensor, torch.Tensor], Attention]  # of (spec, KV array, block table)


class LayerWindows:
    """``kernels.attention.Attention`` for ``spec.layer_windows``: every step is planned once for each window."""

    def __init__(self, backend: Backend, spec: ModelSpec, kv: torch.Tensor, table: torch.Tensor) -> None:
        windows = spec.layer_windows or ()
        uniform = {
            window: backend(msgspec.structs.replace(spec, sliding_window=window, layer_windows=None), kv, table)
            for window in dict.fromkeys(windows)
        }
        self._backends = list(uniform.values())
        self._of_layer = [uniform[window] for window in windows]

    def plan(self, rows: AttentionRows) -> None:
        for backend in self._backends:
            backend.plan(rows)

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self._of_layer[layer].run(layer, q, k, v)
