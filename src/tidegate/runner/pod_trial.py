"""How long attention of hybrid steps takes on this device, in two kernels and in one: measured over a grid of shapes,
in a second or so, when a lane starts that may choose between them."""

import logging
import math
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tidegate.base.specs import ModelSpec
from tidegate.device.places import Place
from tidegate.kernels.flashinfer_attention import (
    LEAST_SCRATCH_BYTES,
    DecodeRows,
    LayerCache,
    PagedRows,
    PrefillRows,
    Workspace,
)
from tidegate.kernels.pod_attention import PodRows, scratch_bytes
from tidegate.kernels.pod_rule import APART, AXES, POD, Axes, HybridWork, PodRule
from tidegate.kernels.step_rows import ApartRows, Rows, Types
from tidegate.runner.gpu_runner import CAPTURE
from tidegate.runner.shapes import MAX_SLICES, PADDING, StepShape

LAYERS = 8  # in one graph: each reads KV of its own, which no cache holds yet, as in a step
RUNS = 3  # of a graph; the fastest counts
MOST_DIFFERENCE = 0.05  # in bf16 it is some 0.005

log = logging.getLogger("tidegate.runner")


class Trial(NamedTuple):
    seconds: dict[HybridWork, tuple[float, float]]  # of one layer: apart, as POD
    difference: float  # of the two forms' results, relative to them: the largest of all shapes


@torch.inference_mode()
def measure(spec: ModelSpec, kv: torch.Tensor, place: Place, axes: Axes = AXES) -> Trial:
    """At all points of ``axes``. ``kv``: a pool's array, which nobody uses yet: it is written, and zero afterwards.
    Where it is smaller than a shape's KV, rows share blocks. Waits for the device."""
    stream, layers = place.capture_stream, kv[:LAYERS]
    assert stream is not None
    seconds: dict[HybridWork, tuple[float, float]] = {}
    difference = 0.0
    with torch.cuda.stream(stream):
        layers.normal_()
        scratch = torch.empty(_scratch_bytes(spec, kv.device, axes), dtype=torch.uint8, device=kv.device)
        workspaces = Workspace(scratch), Workspace(scratch)
        for shape, works in groupby(sorted(axes.points(), key=_shape_of), key=_shape_of):
            attention = _Attention(spec, layers, workspaces, shape, axes)
            for work in works:
                attention.load(work)
                seconds[work] = attention.seconds(APART, stream), attention.seconds(POD, stream)
                difference = max(difference, attention.difference())
        layers.zero_()
        stream.synchronize()
    torch.cuda.empty_cache()
    return Trial(seconds, difference)


def rule_for(spec: ModelSpec, kv: torch.Tensor, place: Place) -> PodRule | None:
    """From a trial; None, with a line in the log, where the kernel does not compute what the two compute."""
    trial = measure(spec, kv, place)
    if trial.difference <= MOST_DIFFERENCE:
        return PodRule(trial.seconds)
    log.warning("attention in one kernel is not used: its results differ by %.2g of those of two", trial.difference)
    return None


def _scratch_bytes(spec: ModelSpec, device: torch.device, axes: Axes) -> int:
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    largest = axes.prompt_tokens[-1], MAX_SLICES, PADDING.padded_rows(axes.rows[-1])
    return max(LEAST_SCRATCH_BYTES, sum(scratch_bytes(spec, *largest, sms)))


def _shape_of(work: HybridWork) -> StepShape:
    return StepShape(int(work.prompt_tokens), PADDING.padded_rows(int(work.rows)))


class _Attention:
    """Attention of one shape of step over several layers, as a graph of each form."""

    def __init__(
        self, spec: ModelSpec, kv: torch.Tensor, workspaces: tuple[Workspace, Workspace], shape: StepShape, axes: Axes
    ) -> None:
        self._shape, self._block_size, self._num_blocks = shape, kv.shape[3], kv.shape[2]
        device, types = kv.device, Types(kv.dtype, kv.dtype)
        prompt_blocks = self._blocks(axes.start[-1] + shape.prefill_tokens)
        row_blocks = self._blocks(axes.context[-1])
        self._scattered = np.random.default_rng(0).permutation(self._num_blocks).astype(np.int32)

        def ints(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self._qo_indptr = ints(MAX_SLICES + 1)
        self._prompts = PagedRows(ints(MAX_SLICES + 1), ints(prompt_blocks), ints(MAX_SLICES))
        self._rows = PagedRows(ints(shape.decodes + 1), ints(shape.decodes * row_blocks), ints(shape.decodes))
        block_size = self._block_size
        self._prefill = PrefillRows(
            spec, types, block_size, shape.prefill_tokens, workspaces[0], self._qo_indptr, self._prompts
        )
        self._decode = DecodeRows(spec, types, block_size, workspaces[1], self._rows)
        self._pod = PodRows(
            spec, types, block_size, shape.prefill_tokens, workspaces, self._qo_indptr, self._prompts, self._decode
        )
        apart = ApartRows(shape.prefill_tokens, self._prefill, self._decode, torch.cuda.Stream(device))
        self._forms: dict[str, Rows] = {APART: apart, POD: self._pod}
        tokens = shape.prefill_tokens + shape.decodes
        self._q = torch.randn((tokens, spec.num_heads, spec.head_dim), dtype=kv.dtype, device=device)
        self._out = {form: torch.zeros_like(self._q) for form in (APART, POD)}
        self._caches = [LayerCache(layer[0], layer[1]) for layer in kv]
        self._host: dict[str, torch.Tensor] = {}
        self._graphs = self._capture(HybridWork(shape.prefill_tokens, 0, shape.decodes, 1))

    def _capture(self, smallest: HybridWork) -> dict[str, Any]:
        self.load(smallest)
        graphs = {}
        for form in (APART, POD):
            self._plan(form)
            self._run(form)  # loads the kernels, which a capture may not
            torch.cuda.current_stream().synchronize()
            graphs[form] = torch.cuda.CUDAGraph()
            with CAPTURE:
                graphs[form].capture_begin(capture_error_mode="thread_local")
                try:
                    self._run(form)
                finally:
                    graphs[form].capture_end()
        return graphs

    def load(self, work: HybridWork) -> None:
        """One prompt's slice, and decode rows, of which the shape's others are padding: they read one token each."""
        new, start, rows, context = (int(value) for value in work)
        end, padding = start + new, self._shape.decodes - rows
        p_blocks, d_blocks = self._blocks(end), self._blocks(context)
        lens = np.array([context] * rows + [1] * padding, dtype=np.int32)
        used = np.array([d_blocks] * rows + [1] * padding)
        others = MAX_SLICES - 1
        host = {
            "qo": np.array([0, *[new] * MAX_SLICES]), "p_indptr": np.array([0, *[p_blocks] * MAX_SLICES]),
            "p_last": np.array([self._last(end), *[1] * others]), "p_lens": np.array([end, *[0] * others]),
            "d_indptr": np.concatenate([[0], np.cumsum(used)]), "d_last": np.array([self._last(n) for n in lens]),
            "d_lens": lens,
        }  # fmt: skip
        self._host = {name: torch.from_numpy(values.astype(np.int32)) for name, values in host.items()}
        self._qo_indptr.copy_(self._host["qo"])
        for rows_of, name in ((self._prompts, "p"), (self._rows, "d")):
            rows_of.indptr.copy_(self._host[f"{name}_indptr"])
            rows_of.last_block_len.copy_(self._host[f"{name}_last"])
        self._rows.indices[: used.sum()].copy_(torch.from_numpy(self._some(int(used.sum()), 0)))
        self._prompts.indices[:p_blocks].copy_(torch.from_numpy(self._some(p_blocks, int(used.sum()))))
        self._decode.plan(self._host["d_indptr"], self._host["d_lens"])

    def seconds(self, form: str, stream: torch.cuda.Stream) -> float:
        """That one layer takes."""
        self._plan(form)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(RUNS + 1)]
        marks[0].record(stream)
        for mark in marks[1:]:
            self._graphs[form].replay()
            mark.record(stream)
        stream.synchronize()
        best_ms = min(before.elapsed_time(after) for before, after in pairwise(marks))
        return float(best_ms) / 1e3 / len(self._caches)

    def difference(self) -> float:
        """Of the two forms' last results, relative to them, for prompt rows or decode rows: the larger one."""
        split = self._shape.prefill_tokens
        apart, pod = (self._out[form].float() for form in (APART, POD))
        parts = ((apart[:split], pod[:split]), (apart[split:], pod[split:]))
        found = max(float((one - other).norm() / one.norm()) for one, other in parts)
        return math.inf if math.isnan(found) else found

    def _plan(self, form: str) -> None:
        rows = self._pod if form == POD else self._prefill
        rows.plan(self._host["qo"], self._host["p_indptr"], self._host["p_lens"])

    def _run(self, form: str) -> None:
        for cache in self._caches:
            self._forms[form].run(self._q, cache, self._out[form])

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _last(self, tokens: int) -> int:
        return (tokens - 1) % self._block_size + 1

    def _some(self, count: int, first: int) -> NDArray[np.int32]:
        return self._scattered[np.arange(first, first + count) % self._num_blocks]
