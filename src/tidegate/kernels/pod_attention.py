"""Attention of a hybrid step's prompt rows and decode rows in one kernel (POD-Attention, arXiv 2410.18038), by
FlashInfer's batched form of it, in a form that a CUDA graph can hold.

FlashInfer has two: ``PODWithPagedKVCacheWrapper`` takes one prompt, whose keys and values lie outside the paged cache;
``BatchPODWithPagedKVCacheWrapper`` takes any number of them, in the cache, but plans into new tensors each time, which
no graph can hold. Here the second one's kernel runs on schedules that FlashInfer's FA2 planner makes for graphs.
"""

import math
from typing import Any

import torch
from flashinfer.pod import get_batch_pod_module
from flashinfer.utils import MaskMode, TensorLayout

from tidegate.base.specs import ModelSpec
from tidegate.kernels.flashinfer_attention import (
    INT_WORKSPACE_BYTES,
    DecodeRows,
    LayerCache,
    PagedRows,
    Workspace,
    fa2_module,
)
from tidegate.kernels.pod_rule import DECODE_TILE, PROMPT_TILE, partial_bytes
from tidegate.kernels.step_rows import Types

MOST_SPLIT_TOKENS = 1536  # with more prompt tokens, leaving SMs to decode rows no longer helps (FlashInfer's choice)
COUNTERS = 1024  # more than the SMs of any device, and two
ALIGNMENT = 512  # of addresses


def build(spec: ModelSpec, types: Types) -> None:
    """Loads the kernel; compiles it first, for some minutes, where FlashInfer has not been given it."""
    _module(spec, types)


def _module(spec: ModelSpec, types: Types) -> Any:
    return get_batch_pod_module(
        types.compute, types.kv, types.compute, spec.head_dim, 0, False, False, False, torch.int32, 0, False, False
    )


def scratch_bytes(spec: ModelSpec, prompt_tokens: int, max_prompts: int, decodes: int, sms: int) -> tuple[int, int]:
    """For partial results of a step's prompt rows and of its decode rows, which exist at the same time."""
    shape = spec.num_heads, spec.num_kv_heads, spec.head_dim
    prompts = partial_bytes(*shape, prompt_tokens, max_prompts, PROMPT_TILE, sms)
    rows = partial_bytes(*shape, decodes, decodes, DECODE_TILE, sms)
    return -(-prompts // ALIGNMENT) * ALIGNMENT, rows


class PodRows:
    """Prompt rows, ``num_tokens`` queries in all, and decode rows. The decode rows' schedule is the one that their
    ``DecodeRows`` plans: what differs is which kernel runs it."""

    def __init__(
        self, spec: ModelSpec, types: Types, block_size: int, num_tokens: int,
        workspaces: tuple[Workspace, Workspace], qo_indptr: torch.Tensor, prompts: PagedRows, decode: DecodeRows,
    ) -> None:  # fmt: skip
        """``workspaces`` of prompt rows and of decode rows; both have the same scratch, of ``scratch_bytes``."""
        self._spec, self._block_size, self._num_tokens = spec, block_size, num_tokens
        self._workspaces = workspaces
        self._qo_indptr, self._prompts, self._decode = qo_indptr, prompts, decode
        device = qo_indptr.device
        count, decodes = len(prompts.last_block_len), len(decode.rows.last_block_len)
        self._decode_qo_indptr = torch.arange(decodes + 1, dtype=torch.int32, device=device)
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        first, second = scratch_bytes(spec, num_tokens, count, decodes, sms)
        scratch = workspaces[0].scratch
        self._scratch = scratch[:first], scratch[first : first + second]
        # Which of its blocks do what is decided by counters that the kernel keeps for each SM and for each kind of row.
        self._counters = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        self._colocated = decode.plan_info[0] if num_tokens <= MOST_SPLIT_TOKENS else 0
        self._fa2, self._run = fa2_module(spec, types), _module(spec, types).run_tensor
        self._plan_info = self._plan_shape(count, device)

    def _plan_shape(self, count: int, device: torch.device) -> Any:
        """Where things lie in the schedule, which depends on the shape alone. The schedule itself goes to a buffer that
        nobody reads, since a step that uses the shared one may be running."""
        lens = torch.zeros(count, dtype=torch.int32)
        lens[0] = self._num_tokens
        qo = torch.full((count + 1,), self._num_tokens, dtype=torch.int32)
        qo[0] = 0
        indptr = torch.arange(count + 1, dtype=torch.int32).clamp_(max=1) * -(-self._num_tokens // self._block_size)
        schedule = torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        staging = torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, pin_memory=True)
        return self._plan(schedule, staging, qo, indptr, lens)

    def plan(self, qo_indptr: torch.Tensor, indptr: torch.Tensor, kv_lens: torch.Tensor) -> None:
        """The prompt rows' schedule of a step; see ``PrefillRows.plan``. The decode rows are planned as ever."""
        workspace = self._workspaces[0]
        self._plan(workspace.schedule, workspace.next_staging(), qo_indptr, indptr, kv_lens)

    def _plan(
        self, schedule: torch.Tensor, staging: torch.Tensor, qo_indptr: torch.Tensor, indptr: torch.Tensor,
        kv_lens: torch.Tensor,
    ) -> Any:  # fmt: skip
        spec = self._spec
        return self._fa2.plan(
            self._scratch[0], schedule, staging, qo_indptr, indptr, kv_lens, self._num_tokens, len(kv_lens),
            spec.num_heads, spec.num_kv_heads, self._block_size, True, spec.head_dim, spec.head_dim, True, -1, -1,
            False, self._colocated,
        )  # fmt: skip

    def run(self, q: torch.Tensor, cache: LayerCache, out: torch.Tensor) -> None:
        """See ``step_rows.Rows``."""
        split, layout = self._num_tokens, TensorLayout.NHD.value
        no_window, no_mask, no_lse, no_slopes, no_cap = -1, (None, None), None, None, 0.0
        keys_and_values = cache.keys, cache.values
        rest = (no_slopes, no_cap, 1.0 / math.sqrt(self._spec.head_dim), 1.0, 1e-4)  # scale; rotary ones are not used
        self._run(
            self._scratch[0], self._workspaces[0].schedule, self._plan_info, q[:split], *keys_and_values,
            self._qo_indptr, *self._prompts, out[:split], no_lse, MaskMode.CAUSAL.value, layout, no_window, *no_mask,
            *rest,
            self._scratch[1], self._workspaces[1].schedule, self._decode.plan_info, q[split:], *keys_and_values,
            self._decode_qo_indptr, *self._decode.rows, out[split:], no_lse, MaskMode.NON_CAUSAL.value, layout,
            no_window, *no_mask, *rest,
            False,  # may not start before the kernel ahead has ended: its blocks count before they would wait
            self._counters,
        )  # fmt: skip
