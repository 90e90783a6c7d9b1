"""Paged attention with FlashInfer, in a form that a CUDA graph can hold: FA3 for prompt rows, FA2's tensor-core
kernel for decode rows.

A step's addresses are fixed at capture; what changes from step to step are the integers in ``meta`` (copied to the
device once a step) and each wrapper's schedule (planned on the host, copied by FlashInfer's ``plan``). Schedules are
staged in two pinned buffers in turn, so that a step can be planned while the copy for the one before is pending.
"""

from typing import Any, NamedTuple

import flashinfer
import torch
from flashinfer.prefill import get_batch_prefill_module

from tidegate.base.specs import ModelSpec
from tidegate.kernels.step_rows import Rows
from tidegate.kernels.triton_write_kv import write_kv

INT_WORKSPACE_BYTES = 8 << 20


def build(spec: ModelSpec, dtype: torch.dtype) -> None:
    """Loads the kernels that rows of a model need; compiles them first where FlashInfer has not been given them."""
    for backend in ("fa3", "fa2"):
        _module(backend, spec, dtype)


def fa2_module(spec: ModelSpec, dtype: torch.dtype) -> Any:
    """The kernel and the planner of decode rows."""
    return _module("fa2", spec, dtype)


def _module(backend: str, spec: ModelSpec, dtype: torch.dtype) -> Any:
    windowed = spec.sliding_window is not None
    return get_batch_prefill_module(
        backend, dtype, dtype, dtype, torch.int32, spec.head_dim, spec.head_dim, 0, windowed, False, False
    )


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
        self, spec: ModelSpec, dtype: torch.dtype, block_size: int, num_tokens: int, workspace: Workspace,
        qo_indptr: torch.Tensor, rows: PagedRows,
    ) -> None:  # fmt: skip
        self._spec, self._dtype, self._block_size, self._num_tokens = spec, dtype, block_size, num_tokens
        self._workspace = workspace
        self._window = spec.sliding_window - 1 if spec.sliding_window else -1
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace.scratch, "NHD", use_cuda_graph=True, qo_indptr_buf=qo_indptr, paged_kv_indptr_buf=rows.indptr,
            paged_kv_indices_buf=rows.indices, paged_kv_last_page_len_buf=rows.last_block_len, backend="fa3",
        )  # fmt: skip
        self._module = _module("fa3", spec, dtype)

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
            size, causal=True, window_left=self._window, q_data_type=self._dtype, kv_data_type=self._dtype,
            seq_lens=lens,
        )  # fmt: skip

    def plan(self, qo_indptr: torch.Tensor, indptr: torch.Tensor, kv_lens: torch.Tensor) -> None:
        """The schedule of a step, from int32 tensors on the host; enqueues its copy on the current stream."""
        spec = self._spec
        self._module.plan(
            self._workspace.scratch, self._workspace.schedule, self._workspace.next_staging(), qo_indptr, indptr,
            kv_lens, self._num_tokens, len(kv_lens), spec.num_heads, spec.num_kv_heads, self._block_size, True,
            spec.head_dim, spec.head_dim, True, self._window,
        )  # fmt: skip

    def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
        self._wrapper.run(q, cache, out=out)


class DecodeRows:
    """One query a row; ``len(rows.last_block_len)`` rows, padding included.

    On the tensor cores (the FA2 kernel, query heads of a group as its rows): FlashInfer's decode kernel proper is bound
    by arithmetic near 2.7 TB/s on an H200.
    """

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, block_size: int, workspace: Workspace, rows: PagedRows
    ) -> None:
        self._spec, self._dtype, self._block_size = spec, dtype, block_size
        self._workspace = workspace
        self.rows = rows
        self._window = spec.sliding_window - 1 if spec.sliding_window else -1
        self._num_rows = len(rows.last_block_len)
        self._qo_indptr = torch.arange(self._num_rows + 1, dtype=torch.int32)
        self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace.scratch, "NHD", use_cuda_graph=True, use_tensor_cores=True, paged_kv_indptr_buffer=rows.indptr,
            paged_kv_indices_buffer=rows.indices, paged_kv_last_page_len_buffer=rows.last_block_len, backend="fa2",
        )  # fmt: skip
        self._module = fa2_module(spec, dtype)

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
            torch.arange(count + 1, dtype=torch.int32), torch.zeros(count, dtype=torch.int32),
            torch.ones(count, dtype=torch.int32), spec.num_heads, spec.num_kv_heads, spec.head_dim, self._block_size,
            window_left=self._window, q_data_type=self._dtype, kv_data_type=self._dtype,
        )  # fmt: skip

    def plan(self, indptr: torch.Tensor, kv_lens: torch.Tensor) -> None:
        """See ``PrefillRows.plan``."""
        spec, count = self._spec, self._num_rows
        self._module.plan(
            self._workspace.scratch, self._workspace.schedule, self._workspace.next_staging(), self._qo_indptr, indptr,
            kv_lens, count, count, spec.num_heads, spec.num_kv_heads, self._block_size, True, spec.head_dim,
            spec.head_dim, False, self._window, -1, False, 0,
        )  # fmt: skip

    def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
        self._wrapper.run(q, cache, out=out)


class GraphAttention:
    """``kernels.attention.Attention.run`` for a step of these rows."""

    def __init__(self, kv: torch.Tensor, places: torch.Tensor, rows: Rows) -> None:
        self._caches = [(layer[0], layer[1]) for layer in kv]
        self._places = places  # int32 [T]: where in the array each token's KV goes
        self._rows = rows

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cache = self._caches[layer]
        write_kv(k, v, *cache, self._places)
        q = q.contiguous()
        out = torch.empty_like(q)
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
