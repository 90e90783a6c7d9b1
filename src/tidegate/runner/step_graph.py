"""A step as one CUDA graph: embedding, layers, logits and the greedy choice, for a fixed number of prompt tokens and
decode rows. A batch is put into the smallest graph that holds it; what it does not fill is padding, which reads and
writes only a block and a slot that belong to nobody.

A hybrid step may have a second graph, which differs in that attention is one kernel (``kernels.pod_attention``).
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tidegate.base.batch import Batch
from tidegate.base.specs import ModelSpec
from tidegate.device.gpu_memory import borrowed
from tidegate.device.pool import Pool
from tidegate.kernels.choose_attention import GraphKernels
from tidegate.kernels.flashinfer_attention import PagedRows, SwitchedAttention, Workspace
from tidegate.kernels.pod_attention import PodRows
from tidegate.kernels.pod_rule import APART, POD
from tidegate.kernels.step_rows import ApartRows, Types
from tidegate.models.registry import Model
from tidegate.runner.shapes import MAX_SLICES, Scratch, StepShape


class _Layout:
    """Where each integer array of a step lies on the host. On the device the first ``fixed`` are the graph's own, and
    the two lists of blocks the lane's."""

    def __init__(self, shape: StepShape, per_seq: int) -> None:
        tokens = shape.prefill_tokens + shape.decodes
        slices = MAX_SLICES if shape.prefill_tokens else 0
        sizes = {
            "slots": tokens, "positions": tokens, "places": tokens, "inputs": shape.prefill_tokens,
            "sampled": slices + shape.decodes,
            "qo_indptr": slices + 1, "p_indptr": slices + 1, "p_last": slices,
            "d_indptr": shape.decodes + 1, "d_last": shape.decodes,
            "p_indices": slices * per_seq, "d_indices": shape.decodes * per_seq,
        }  # fmt: skip
        self.spans: dict[str, tuple[int, int]] = {}
        at = 0
        for name, size in sizes.items():
            self.spans[name] = (at, at + size)
            at += -(-size // 4) * 4  # kernels want 16-byte alignment
        self.size = at
        self.fixed = self.spans["p_indices"][0]


class BlockLists:
    """On the device, the blocks of a step's prompts and those of its decodes, row after row. Shared by all of a lane's
    graphs: a step's are filled behind the step before. With long contexts each is megabytes."""

    def __init__(self, num_decodes: int, per_seq: int, device: torch.device) -> None:
        self.prefill = torch.zeros(MAX_SLICES * per_seq, dtype=torch.int32, device=device)
        self.decode = torch.zeros(num_decodes * per_seq, dtype=torch.int32, device=device)


class Staging:
    """Page-locked memory in which a lane's steps are laid out, in two buffers in turn: one is filled while the copy of
    the other may be pending. Shared by all graphs, so that capturing one makes the driver lock no pages."""

    def __init__(self) -> None:
        self._buffers = [torch.empty(0, dtype=torch.int32) for _ in range(2)]

    def next(self, size: int) -> torch.Tensor:
        """int32 [size], of any content."""
        self._buffers.reverse()
        if len(self._buffers[0]) < size:
            self._buffers[0] = torch.empty(size, dtype=torch.int32, pin_memory=True)
        return self._buffers[0][:size]


class _Recorded:
    """The step with one form of attention, and the graph that it has been recorded to."""

    def __init__(self, attention: Any) -> None:
        self.attention = attention
        self.graph = torch.cuda.CUDAGraph()
        self.logits = self.tokens = torch.empty(0)


class StepGraph:
    """Not thread-safe: belongs to one lane. Made, warmed up and captured on one stream, replayed on any."""

    def __init__(
        self, spec: ModelSpec, model: Model, attention: SwitchedAttention, kernels: GraphKernels, types: Types,
        pool: Pool, shape: StepShape, scratch: Scratch, workspaces: tuple[Workspace, Workspace], lists: BlockLists,
        staging: Staging, pod: bool = False, side: torch.cuda.Stream | None = None,
    ) -> None:  # fmt: skip
        """``pod``: of a hybrid shape, with the second graph. ``side``: see ``ApartRows``."""
        self.shape = shape
        self._model, self._attention, self._pool, self._scratch = model, attention, pool, scratch
        self._layout = _Layout(shape, pool.spec.max_blocks_per_seq)
        self._meta = torch.zeros(self._layout.fixed, dtype=torch.int32, device=pool.kv.device)
        self._lists, self._staging = lists, staging
        block_size = pool.spec.block_size
        self._prefill = self._decode = self._pod = None
        prompts = PagedRows(self._of("p_indptr"), lists.prefill, self._of("p_last"))
        if shape.prefill_tokens:
            self._prefill = kernels.prefill_rows(
                spec, types, block_size, shape.prefill_tokens, workspaces[0], self._of("qo_indptr"), prompts
            )
        if shape.decodes:
            rows = PagedRows(self._of("d_indptr"), lists.decode, self._of("d_last"))
            self._decode = kernels.decode_rows(spec, types, block_size, workspaces[1], rows)
        places, apart = self._of("places"), ApartRows(shape.prefill_tokens, self._prefill, self._decode, side)
        self.forms = {APART: _Recorded(kernels.attention(pool.kv, places, apart))}
        if pod:
            assert self._decode is not None
            self._pod = PodRows(
                spec, types, block_size, shape.prefill_tokens, workspaces, self._of("qo_indptr"), prompts, self._decode
            )
            self.forms[POD] = _Recorded(kernels.attention(pool.kv, places, self._pod))
        self._loaded = self.forms[APART]
        # After a replay, until the next replay of any of the lane's graphs:
        self.logits = torch.empty(0)  # float32 [rows that may sample, vocab]
        self.tokens = torch.empty(0)  # int64 [rows that may sample]: the greedy choice

    # ---- capture

    def warm_up(self) -> None:
        """Runs empty steps on the current stream, without waiting for them: compiles and sets up what a capture may
        not. Uses the workspaces."""
        for form, recorded in self.forms.items():
            self._load_padding(form)
            self._attention.current = recorded.attention
            self._compute()

    def capture(self, memory: Any) -> None:
        """Records the step on the current stream; kernels stay on that stream's part of the device. ``memory``: the
        pool of graph memory that the lane's graphs share. Neither waits for the device nor gives it any work: torch's
        own context manager would do both."""
        torch.cuda.current_blas_handle()  # each thread has its own, which can't be made while it captures
        for recorded in self.forms.values():
            self._attention.current = recorded.attention
            recorded.graph.capture_begin(memory, capture_error_mode="thread_local")
            try:
                logits, tokens = self._compute()
            finally:
                recorded.graph.capture_end()
            # Borrowed, so that the memory of one graph's results is the next one's too: logits are the largest here.
            recorded.logits, recorded.tokens = borrowed(logits), borrowed(tokens)
        self._show(APART)

    def _compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        store, split = self._pool.tokens, self.shape.prefill_tokens
        slots, positions = self._of("slots").long(), self._of("positions").long()
        store.index_put_((slots[:split], positions[:split]), self._of("inputs"))
        sampled = self._of("sampled").long()
        wanted = sampled if split else None  # decode rows all sample, in their order
        logits = self._model.logits(self._model.forward(store[slots, positions].long(), positions, wanted))
        tokens = logits.argmax(-1)
        store.index_put_((slots[sampled], positions[sampled] + 1), tokens.int())
        return logits, tokens

    # ---- steps

    def load(self, batch: Batch, table: NDArray[np.int32], form: str = APART) -> list[int]:
        """Enqueues the batch's integers and schedules on the current stream. ``table`` is the host's block table, and
        ``form`` one of ``forms``, which the next replay is of.

        Returns the row of ``logits`` and ``tokens`` of each sampled row, in the batch's order.
        """
        self._show(form)
        host = self._staging.next(self._layout.size)
        array = host.numpy()
        view = {name: array[a:b] for name, (a, b) in self._layout.spans.items()}
        self._fill_padding(view)
        size, split = self._pool.spec.block_size, self.shape.prefill_tokens
        sampled_rows: list[int] = []
        at = blocks = 0
        kv_lens = np.zeros(MAX_SLICES, dtype=np.int32)
        for i, piece in enumerate(batch.slices):
            count = len(piece.tokens)
            end = piece.start + count
            here = slice(at, at + count)
            positions = np.arange(piece.start, end, dtype=np.int32)
            row = table[piece.slot]
            view["slots"][here] = piece.slot
            view["positions"][here] = positions
            view["places"][here] = row[positions // size] * size + positions % size
            view["inputs"][here] = piece.tokens
            used = -(-end // size)
            view["p_indices"][blocks : blocks + used] = row[:used]
            at, blocks = at + count, blocks + used
            view["qo_indptr"][i + 1 :] = at
            view["p_indptr"][i + 1 :] = blocks
            view["p_last"][i] = end - (used - 1) * size
            kv_lens[i] = end
            if piece.sample:
                view["sampled"][i] = at - 1
                sampled_rows.append(i)
        decodes = len(batch.decode_slots)
        listed = 0
        context_lens = np.ones(self.shape.decodes, dtype=np.int32)
        if decodes:
            slots = np.array(batch.decode_slots, dtype=np.int32)
            positions = np.array(batch.decode_positions, dtype=np.int32)
            here = slice(split, split + decodes)
            rows = table[slots]
            view["slots"][here] = slots
            view["positions"][here] = positions
            view["places"][here] = rows[np.arange(decodes), positions // size] * size + positions % size
            used_blocks = positions // size + 1
            listed = int(used_blocks.sum())
            widest = int(used_blocks.max())
            view["d_indices"][:listed] = rows[:, :widest][np.arange(widest) < used_blocks[:, None]]
            view["d_indptr"][1 : decodes + 1] = np.cumsum(used_blocks)
            view["d_last"][:decodes] = positions % size + 1
            context_lens[:decodes] = positions + 1
            first = MAX_SLICES if split else 0
            sampled_rows += range(first, first + decodes)
        if self._decode is not None:
            padding = self.shape.decodes - decodes
            view["d_indices"][listed : listed + padding] = self._scratch.block
            view["d_indptr"][decodes + 1 :] = listed + 1 + np.arange(padding)
            listed += padding
        self._send(host, blocks, listed, kv_lens, context_lens, self._pod if form == POD else self._prefill)
        return sampled_rows

    def replay(self) -> None:
        self._loaded.graph.replay()

    def _show(self, form: str) -> None:
        self._loaded = self.forms[form]
        self.logits, self.tokens = self._loaded.logits, self._loaded.tokens

    def _fill_padding(self, view: dict[str, NDArray[np.int32]]) -> None:
        scratch = self._scratch
        view["slots"][:] = scratch.slot
        view["positions"][:] = 0
        view["places"][:] = scratch.block * self._pool.spec.block_size
        view["inputs"][:] = 0
        view["qo_indptr"][:] = 0
        view["p_indptr"][:] = 0
        view["p_last"][:] = 1
        view["d_indptr"][:] = 0
        view["d_last"][:] = 1
        split, slices = self.shape.prefill_tokens, MAX_SLICES if self.shape.prefill_tokens else 0
        view["sampled"][slices:] = np.arange(split, split + self.shape.decodes)
        # A slice row that does not sample reads some token's state and stores where padding stores. The last token of
        # the prompt part is padding, or else its row is overwritten by ``load``.
        view["sampled"][:slices] = max(split - 1, 0)

    def _load_padding(self, form: str) -> None:
        """An empty step."""
        self.load(Batch(0, 1.0, [], [], [], [], []), np.zeros((1, 1), dtype=np.int32), form)

    def _send(
        self, host: torch.Tensor, prefill_blocks: int, decode_blocks: int, kv_lens: NDArray[np.int32],
        context_lens: NDArray[np.int32], prompts: Any,
    ) -> None:  # fmt: skip
        self._meta.copy_(host[: self._layout.fixed], non_blocking=True)
        if prompts is not None:
            self._list(host, "p_indices", prefill_blocks, self._lists.prefill)
            prompts.plan(self._host(host, "qo_indptr"), self._host(host, "p_indptr"), torch.from_numpy(kv_lens))
        if self._decode is not None:
            self._list(host, "d_indices", decode_blocks, self._lists.decode)
            self._decode.plan(self._host(host, "d_indptr"), torch.from_numpy(context_lens))

    def _list(self, host: torch.Tensor, name: str, count: int, blocks: torch.Tensor) -> None:
        if count:
            blocks[:count].copy_(self._host(host, name)[:count], non_blocking=True)

    def _host(self, host: torch.Tensor, name: str) -> torch.Tensor:
        start, end = self._layout.spans[name]
        return host[start:end]

    def _of(self, name: str) -> torch.Tensor:
        start, end = self._layout.spans[name]
        return self._meta[start:end]
