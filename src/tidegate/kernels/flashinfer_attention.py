"""Paged attention with FlashInfer, in a form that a CUDA graph can hold: FA3 for prompt rows, FA2's tensor-core
kernel for decode rows. FA3 does not take keys and values in FP8 where queries are in bf16: then FA2 does both.

A step's addresses are fixed at capture; what changes from step to step are the integers in ``meta`` (copied to the
device once a step) and each wrapper's schedule (planned on the host, copied by FlashInfer's ``plan``). Schedules are
staged in two pinned buffers in turn, so that a step can be planned while the copy for the one before is pending.
"""

from typing import Any, NamedTuple

import flashinfer
import torch
from flashinfer.prefill import get_batch_prefill_module

from tidegate.base.specs import ModelSpec
from tidegate.kernels.fp8 import KvScales
from tidegate.kernels.triton_write_kv import write_kv

INT_WORKSPACE_BYTES = 8 << 20
LEAST_SCRATCH_BYTES = 256 << 20
_FA2_TILE_ROWS = 128  # rows of a query tile of FA2's, at most: the query heads of a group, one token's after another's
_FA2_BLOCKS_PER_SM = 2


class Types(NamedTuple):
    """Of a step: what queries and results are in, and what the KV array is in."""

    compute: torch.dtype
    kv: torch.dtype

    @property
    def prefill_backend(self) -> str:
        return "fa3" if self.kv == self.compute else "fa2"


def build(spec: ModelSpec, types: Types) -> None:
    """Loads the kernels that rows of a model need; compiles them first where FlashInfer has not been given them."""
    for backend in {types.prefill_backend, "fa2"}:
        _module(backend, spec, types)


def _module(backend: str, spec: ModelSpec, types: Types) -> Any:
    windowed = spec.sliding_window is not None
    return get_batch_prefill_module(
        backend, types.compute, types.kv, types.compute, torch.int32, spec.head_dim, spec.head_dim, 0, windowed, False,
        False,
    )  # fmt: skip


def scratch_bytes(spec: ModelSpec, types: Types, num_tokens: int, num_rows: int, num_sms: int) -> int:
    """What rows need for partial results: ``num_tokens`` prompt tokens at most, of ``num_rows`` prompts. In a graph FA2
    always divides keys among blocks, and keeps a partial result for every tile of queries that there may be."""
    if types.prefill_backend != "fa2":
        return LEAST_SCRATCH_BYTES
    tiles = -(-num_tokens * (spec.num_heads // spec.num_kv_heads) // _FA2_TILE_ROWS) + num_rows - 1
    tiles = max(tiles, _FA2_BLOCKS_PER_SM * num_sms // spec.num_kv_heads)
    return max(LEAST_SCRATCH_BYTES, spec.num_heads * tiles * _FA2_TILE_ROWS * (spec.head_dim + 1) * 4 + 4096)


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
            backend=types.prefill_backend,
        )  # fmt: skip
        self._module = _module(types.prefill_backend, spec, types)
        self._fa2_options = (-1, False, 0) if types.prefill_backend == "fa2" else ()

        self._plan_shape(len(rows.last_block_len))
        workspace.serve(self._wrapper)

    def _plan_shape(self, num_rows: int) -> None:
        """FlashInfer's own plan, which also sets what ``run`` reads on the host. Its schedule goes to a buffer of the
        wrapper's own, since a step that uses the shared one may be running."""
        spec, size = self._spec, self._block_size
        qo = torch.full((num_rows + 1,), self._num_tokens, dtype=torch.int32)
        qo[0] = 0
        blocks = -(-self._num_tokens // size)
        indptr = torch.arange(num_rows + 1, dtype=torch.int32).clamp_(max=1) * blocks
        last = torch.full((num_rows,), self._num_tokens - (blocks - 1) * size, dtype=torch.int32)
        lens = torch.zeros(num_rows, dtype=torch.int32)
        lens[0] = self._num_tokens
        self._wrapper.plan(
            qo, indptr, torch.zeros(blocks, dtype=torch.int32), last, spec.num_heads, spec.num_kv_heads, spec.head_dim,
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

    def run(
        self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], scales: tuple[float, float], out: torch.Tensor
    ) -> None:
        """``scales``: by which the cache's keys and values are to be multiplied."""
        self._wrapper.run(q, cache, k_scale=scales[0], v_scale=scales[1], out=out)


class DecodeRows:
    """One query a row; ``len(rows.last_block_len)`` rows, padding included.

    On the tensor cores (the FA2 kernel, query heads of a group as its rows): FlashInfer's decode kernel proper is bound
    by arithmetic near 2.7 TB/s on an H200.
    """

    def __init__(self, spec: ModelSpec, types: Types, block_size: int, workspace: Workspace, rows: PagedRows) -> None:
        self._spec, self._types, self._block_size = spec, types, block_size
        self._workspace = workspace
        self._window = spec.sliding_window - 1 if spec.sliding_window else -1
        self._num_rows = len(rows.last_block_len)
        self._qo_indptr = torch.arange(self._num_rows + 1, dtype=torch.int32)
        self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace.scratch, "NHD", use_cuda_graph=True, use_tensor_cores=True, paged_kv_indptr_buffer=rows.indptr,
            paged_kv_indices_buffer=rows.indices, paged_kv_last_page_len_buffer=rows.last_block_len, backend="fa2",
        )  # fmt: skip
        self._module = _module("fa2", spec, types)

        self._plan_shape()
        workspace.serve(self._wrapper)

    def _plan_shape(self) -> None:
        """See ``PrefillRows._plan_shape``."""
        spec, count = self._spec, self._num_rows
        self._wrapper.plan(
            torch.arange(count + 1, dtype=torch.int32), torch.zeros(count, dtype=torch.int32),
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
            spec.head_dim, False, self._window, -1, False, 0,
        )  # fmt: skip

    def run(
        self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], scales: tuple[float, float], out: torch.Tensor
    ) -> None:
        """See ``PrefillRows.run``."""
        self._wrapper.run(q, cache, k_scale=scales[0], v_scale=scales[1], out=out)


class GraphAttention:
    """``kernels.attention.Attention.run`` for a step of ``num_prefill`` prompt tokens followed by decode rows."""

    def __init__(
        self, kv: torch.Tensor, scales: KvScales, places: torch.Tensor, num_prefill: int, prefill: PrefillRows | None,
        decode: DecodeRows | None,
    ) -> None:  # fmt: skip
        self._caches = [(layer[0], layer[1]) for layer in kv]
        self._scales = scales  # 1 where the array is not in FP8
        self._places = places  # int32 [T]: where in the array each token's KV goes
        self._num_prefill = num_prefill
        self._prefill, self._decode = prefill, decode

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cache, scales, split = self._caches[layer], self._scales[layer], self._num_prefill
        write_kv(k, v, *cache, self._places, scales)
        q = q.contiguous()
        out = torch.empty_like(q)
        if self._prefill is not None:
            self._prefill.run(q[:split], cache, scales, out[:split])
        if self._decode is not None:
            self._decode.run(q[split:], cache, scales, out[split:])
        return out


class SwitchedAttention:
    """Lets one model be captured over many attentions: runs whichever is ``current``."""

    def __init__(self) -> None:
        self.current: Any = None

    def plan(self, rows: object) -> None:
        raise AssertionError("graphs are planned one by one")

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.current.run(layer, q, k, v)  # type: ignore[no-any-return]
