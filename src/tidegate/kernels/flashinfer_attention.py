"""Paged attention with FlashInfer, in a form that a CUDA graph can hold: FA3 for prompt rows, FA2's tensor-core
kernel for decode rows. FA3 does not take keys and values in FP8 where queries are in bf16: then FA2 does both.

A step's addresses are fixed at capture; what changes from step to step are the integers in ``meta`` (copied to the
device once a step) and each wrapper's schedule (planned on the host, copied by FlashInfer's ``plan``). Schedules are
staged in two pinned buffers in turn, so that a step can be planned while the copy for the one before is pending.
"""

from typing import Any, NamedTuple

import flashinfer
import numpy as np
import torch
from flashinfer.prefill import get_batch_prefill_module
from numpy.typing import NDArray

from tidegate.base.specs import ModelSpec
from tidegate.kernels.decode_split import blocks_apiece
from tidegate.kernels.fp8 import KvScales
from tidegate.kernels.pod_rule import DECODE_TILE, partial_bytes
from tidegate.kernels.step_rows import Rows, Types
from tidegate.kernels.triton_write_kv import write_kv

INT_WORKSPACE_BYTES = 8 << 20
_BLOCKS_PER_SM = 2  # thread blocks of FA2's that run on an SM, as FlashInfer's planner has it
LEAST_SCRATCH_BYTES = 256 << 20
_FA2_TILE_ROWS = 128  # rows of a query tile of FA2's, at most: the query heads of a group, one token's after another's
_ALIGNMENT_BYTES = 4096  # what aligning the results may take


class LayerCache(NamedTuple):
    """A layer's part of the KV array."""

    keys: torch.Tensor  # [blocks, block_size, Hkv, D], over the first of ``scales``
    values: torch.Tensor  # the same, over the second
    scales: tuple[float, float] = (1.0, 1.0)


def prefill_backend(types: Types) -> str:
    return "fa3" if types.kv == types.compute else "fa2"


def build(spec: ModelSpec, types: Types) -> None:
    """Loads the kernels that rows of a model need; compiles them first where FlashInfer has not been given them."""
    for backend in {prefill_backend(types), "fa2"}:
        _module(backend, spec, types)


def fa2_module(spec: ModelSpec, types: Types) -> Any:
    """The kernel and the planner of decode rows."""
    return _module("fa2", spec, types)


def _module(backend: str, spec: ModelSpec, types: Types) -> Any:
    windowed = spec.sliding_window is not None
    return get_batch_prefill_module(
        backend, types.compute, types.kv, types.compute, torch.int32, spec.head_dim, spec.head_dim, 0, windowed, False,
        False,
    )  # fmt: skip


def scratch_bytes(
    spec: ModelSpec, types: Types, num_tokens: int, num_rows: int, num_sms: int, num_decodes: int = 0
) -> int:
    """What rows need for partial results: ``num_tokens`` prompt tokens at most, of ``num_rows`` prompts, and then
    ``num_decodes`` decode rows in the same memory. In a graph FA2 always divides keys among blocks, and keeps a partial
    result for every tile of queries that there may be."""
    if spec.latent is not None:  # another kernel, with partial results of its own
        return LEAST_SCRATCH_BYTES
    shape = spec.num_heads, spec.num_kv_heads, spec.head_dim
    tile = DECODE_TILE if spec.num_heads // spec.num_kv_heads <= DECODE_TILE else _FA2_TILE_ROWS
    partial = partial_bytes(*shape, num_decodes, num_decodes, tile, num_sms) if num_decodes else 0
    if prefill_backend(types) == "fa2":
        partial = max(partial, partial_bytes(*shape, num_tokens, num_rows, _FA2_TILE_ROWS, num_sms))
    return max(LEAST_SCRATCH_BYTES, partial + _ALIGNMENT_BYTES)


class PagedRows(NamedTuple):
    """Rows of one kind, as the kernels take them: int32 tensors on the device, filled before each replay."""

    indptr: torch.Tensor  # [rows + 1]: row r's blocks are indices[indptr[r] : indptr[r + 1]]
    indices: torch.Tensor  # [most blocks of all rows]
    last_block_len: torch.Tensor  # [rows]: tokens in each row's last block


class Workspace:
    """What all rows of one kind in one lane share: every step plans before it runs, so one schedule is enough on the
    device, and two on the host."""

    def __init__(self, scratch: torch.Tensor) -> None:
        """``scratch`` bytes on the device are for partial results; rows of both kinds may use the same."""
        self.scratch = scratch
        self.schedule = torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=scratch.device)
        self._staging = [torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

    def next_staging(self) -> torch.Tensor:
        self._staging.reverse()
        return self._staging[0]

    def serve(self, wrapper: Any) -> None:
        """Makes a wrapper that has planned its shape use the shared schedule instead of its own."""
        wrapper._int_workspace_buffer = self.schedule
        wrapper._pin_memory_int_workspace_buffer = self._staging[0]


class PrefillRows:
    """Prompt rows: at most ``len(rows.last_block_len)`` of them, ``num_tokens`` queries in all."""

    def __init__(
        self, spec: ModelSpec, types: Types, block_size: int, num_tokens: int, workspace: Workspace,
        qo_indptr: torch.Tensor, rows: PagedRows,
    ) -> None:  # fmt: skip
        self._spec, self._types, self._block_size, self._num_tokens = spec, types, block_size, num_tokens
        self._workspace = workspace
        self._window = spec.sliding_window - 1 if spec.sliding_window else -1
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace.scratch, "NHD", use_cuda_graph=True, qo_indptr_buf=qo_indptr, paged_kv_indptr_buf=rows.indptr,
            paged_kv_indices_buf=rows.indices, paged_kv_last_page_len_buf=rows.last_block_len,
            backend=prefill_backend(types),
        )  # fmt: skip
        self._module = _module(prefill_backend(types), spec, types)
        self._fa2_options = (-1, False, 0) if prefill_backend(types) == "fa2" else ()

        self._plan_shape(len(rows.last_block_len))
        workspace.serve(self._wrapper)

    def _plan_shape(self, num_rows: int) -> None:
        """FlashInfer's own plan, which also sets what ``run`` reads on the host. Its schedule goes to a buffer of the
        wrapper's own, and it is given no blocks to list, since a step that uses the shared ones may be running."""
        spec, size = self._spec, self._block_size
        qo = torch.full((num_rows + 1,), self._num_tokens, dtype=torch.int32)
        qo[0] = 0
        blocks = -(-self._num_tokens // size)
        indptr = torch.arange(num_rows + 1, dtype=torch.int32).clamp_(max=1) * blocks
        last = torch.full((num_rows,), self._num_tokens - (blocks - 1) * size, dtype=torch.int32)
        lens = torch.zeros(num_rows, dtype=torch.int32)
        lens[0] = self._num_tokens
        self._wrapper.plan(
            qo, indptr, torch.zeros(0, dtype=torch.int32), last, spec.num_heads, spec.num_kv_heads, spec.head_dim,
            size, causal=True, window_left=self._window, q_data_type=self._types.compute, kv_data_type=self._types.kv,
            o_data_type=self._types.compute, seq_lens=lens,
        )  # fmt: skip

    def plan(self, qo_indptr: torch.Tensor, indptr: torch.Tensor, kv_lens: torch.Tensor) -> None:
        """The schedule of a step, from int32 tensors on the host; enqueues its copy on the current stream."""
        spec = self._spec
        self._module.plan(
            self._workspace.scratch, self._workspace.schedule, self._workspace.next_staging(), qo_indptr, indptr,
            kv_lens, self._num_tokens, len(kv_lens), spec.num_heads, spec.num_kv_heads, self._block_size, True,
            spec.head_dim, spec.head_dim, True, self._window, *self._fa2_options,
        )  # fmt: skip

    def run(self, q: torch.Tensor, cache: LayerCache, out: torch.Tensor) -> None:
        keys, values, (k_scale, v_scale) = cache
        self._wrapper.run(q, (keys, values), k_scale=k_scale, v_scale=v_scale, out=out)


class DecodeRows:
    """One query a row; ``len(rows.last_block_len)`` rows, padding included.

    On the tensor cores (the FA2 kernel, query heads of a group as its rows): FlashInfer's decode kernel proper is bound
    by arithmetic near 2.7 TB/s on an H200.
    """

    def __init__(self, spec: ModelSpec, types: Types, block_size: int, workspace: Workspace, rows: PagedRows) -> None:
        self._spec, self._types, self._block_size = spec, types, block_size
        self._workspace = workspace
        self.rows = rows
        self._window = spec.sliding_window - 1 if spec.sliding_window else -1
        self._num_rows = len(rows.last_block_len)
        self._qo_indptr = torch.arange(self._num_rows + 1, dtype=torch.int32)
        sms = torch.cuda.get_device_properties(workspace.scratch.device).multi_processor_count
        self._at_a_time = max(1, _BLOCKS_PER_SM * sms // spec.num_kv_heads)  # thread blocks of a KV head
        self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace.scratch, "NHD", use_cuda_graph=True, use_tensor_cores=True, paged_kv_indptr_buffer=rows.indptr,
            paged_kv_indices_buffer=rows.indices, paged_kv_last_page_len_buffer=rows.last_block_len, backend="fa2",
        )  # fmt: skip
        self._module = fa2_module(spec, types)

        self._plan_shape()
        workspace.serve(self._wrapper)

    @property
    def plan_info(self) -> Any:
        """Where things lie in the schedule (FlashInfer's ``PrefillPlanInfo``); the same at each step."""
        return self._wrapper._plan_info

    def _plan_shape(self) -> None:
        """See ``PrefillRows._plan_shape``."""
        spec, count = self._spec, self._num_rows
        self._wrapper.plan(
            torch.arange(count + 1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32),
            torch.ones(count, dtype=torch.int32), spec.num_heads, spec.num_kv_heads, spec.head_dim, self._block_size,
            window_left=self._window, q_data_type=self._types.compute, kv_data_type=self._types.kv,
            o_data_type=self._types.compute,
        )  # fmt: skip

    def plan(self, indptr: torch.Tensor, kv_lens: torch.Tensor) -> None:
        """See ``PrefillRows.plan``."""
        spec, count = self._spec, self._num_rows
        self._module.plan(
            self._workspace.scratch, self._workspace.schedule, self._workspace.next_staging(), self._qo_indptr, indptr,
            kv_lens, count, count, spec.num_heads, spec.num_kv_heads, self._block_size, True, spec.head_dim,
            spec.head_dim, False, self._window, self._blocks_apiece(np.diff(indptr.numpy())), False, 0,
        )  # fmt: skip

    def _blocks_apiece(self, blocks: NDArray[np.int32]) -> int:
        """What FlashInfer is told; -1: to choose. It is not told to divide nothing: the graph merges pieces, and that
        plan would not say which."""
        if self._window >= 0 or self._num_rows <= self._at_a_time:
            return -1
        count = blocks_apiece(blocks, self.plan_info[0], self._at_a_time, self._block_size)
        return count if count < blocks.max() else -1

    def run(self, q: torch.Tensor, cache: LayerCache, out: torch.Tensor) -> None:
        keys, values, (k_scale, v_scale) = cache
        self._wrapper.run(q, (keys, values), k_scale=k_scale, v_scale=v_scale, out=out)


class GraphAttention:
    """``kernels.attention.Attention.run`` for a step of these rows."""

    def __init__(self, kv: torch.Tensor, places: torch.Tensor, rows: Rows, scales: KvScales) -> None:
        """``scales``: 1 where the array is not in FP8."""
        self._caches = [LayerCache(layer[0], layer[1], of_layer) for layer, of_layer in zip(kv, scales, strict=True)]
        self._places = places  # int32 [T]: where in the array each token's KV goes
        self._rows = rows

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cache = self._caches[layer]
        write_kv(k, v, cache.keys, cache.values, self._places, cache.scales)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._rows.run(q, cache, out)
        return out


class SwitchedAttention:
    """Lets one model be captured over many attentions: runs whichever is ``current``."""

    def __init__(self) -> None:
        self.current: Any = None

    def plan(self, rows: object) -> None:
        raise AssertionError("graphs are planned one by one")

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.current.run(layer, q, k, v)  # type: ignore[no-any-return]
