"""Runs a lane's batches on a GPU: each is one graph, enqueued without waiting for the one before it."""

import bisect
import threading
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tidegate.base.batch import Batch, BatchResult
from tidegate.base.specs import ModelSpec
from tidegate.device.green_contexts import Part, SmParts
from tidegate.device.pool import Pool
from tidegate.kernels.flashinfer_attention import SwitchedAttention, Workspace
from tidegate.models.registry import build_model
from tidegate.runner.sampler import Sampled, Sampler
from tidegate.runner.step_graph import Scratch, StepGraph, StepShape

CAPTURE = threading.Lock()  # CUDA takes one capture at a time
WORKSPACE_BYTES = 256 << 20
# Sizes of graphs: prompt tokens and decode rows of a step are padded to the next.
PREFILL_STEPS = (64, *range(128, 2049, 128))
DECODE_STEPS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
HYBRID_PREFILL_STEPS = (64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
HYBRID_DECODE_STEPS = (16, 32, 64, 96, 128, 192, 256)


class Enqueued(NamedTuple):
    """A batch on its way. ``done`` is recorded after its tokens have been copied to the host."""

    batch_id: int
    start: torch.cuda.Event
    done: torch.cuda.Event
    tokens: torch.Tensor  # int64, pinned
    rows: list[int]  # where each sampled row's token is
    sampled: Sampled | None  # set where a row asked for more than the greedy token


class GpuRunner:
    """One lane's. Graphs of all shapes and parts share one pool of memory: a lane's steps run one after another."""

    def __init__(
        self, spec: ModelSpec, weights: dict[str, torch.Tensor], pool: Pool, scratch: Scratch, parts: SmParts,
    ) -> None:  # fmt: skip
        self._spec, self._pool, self._scratch, self._parts = spec, pool, scratch, parts
        self._attention = SwitchedAttention()
        self._model = build_model(spec, weights, self._attention)
        self._sampler = Sampler(pool.tokens, spec.vocab_size)
        partial = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=pool.kv.device)
        self._workspaces = Workspace(partial), Workspace(partial)
        self._memory = torch.cuda.graph_pool_handle()
        self._graphs: dict[tuple[StepShape, Part], StepGraph] = {}
        self._last: torch.cuda.Event | None = None

    def shape_for(self, prefill_tokens: int, decodes: int) -> StepShape:
        hybrid = prefill_tokens > 0 and decodes > 0
        prefill_steps, decode_steps = HYBRID_PREFILL_STEPS if hybrid else PREFILL_STEPS, DECODE_STEPS
        return StepShape(
            _at_least(prefill_steps, prefill_tokens),
            _at_least(HYBRID_DECODE_STEPS if hybrid else decode_steps, decodes),
        )

    def prepare(self, shape: StepShape, part: Part) -> StepGraph:
        """The graph of a shape on a part of the device, captured if it is not there yet."""
        graph = self._graphs.get((shape, part))
        if graph is None:
            graph = StepGraph(
                self._spec, self._model, self._attention, self._pool, shape, self._scratch, self._workspaces
            )
            with torch.inference_mode(), CAPTURE:
                graph.capture(self._parts.stream(part), self._memory)
            self._graphs[shape, part] = graph
        return graph

    @torch.inference_mode()
    def enqueue(self, batch: Batch, table: NDArray[np.int32], part: Part) -> Enqueued:
        """Returns as soon as all work has been given to the device."""
        shape = self.shape_for(batch.num_prefill_tokens, len(batch.decode_slots))
        graph = self.prepare(shape, part)
        self._sampler.apply(batch.setups)
        stream = self._parts.stream(part)
        with torch.cuda.stream(stream):
            if self._last is not None:
                stream.wait_event(self._last)  # the lane's batch before may have run on another part
            start = torch.cuda.Event(enable_timing=True)
            done = torch.cuda.Event(enable_timing=True)
            start.record(stream)
            for piece in batch.slices:
                if piece.history:
                    history = torch.tensor(piece.history, dtype=torch.int32)
                    self._pool.tokens[piece.slot, : len(history)].copy_(history)
            rows = graph.load(batch, table)
            graph.replay()
            sampled = self._sample(batch, graph, rows)
            chosen, rows = (graph.tokens, rows) if sampled is None else (sampled.tokens, list(range(len(rows))))
            tokens = torch.empty(len(chosen), dtype=torch.int64, pin_memory=True)
            tokens.copy_(chosen, non_blocking=True)
            done.record(stream)
        self._last = done
        return Enqueued(batch.id, start, done, tokens, rows, sampled)

    def collect(self, enqueued: Enqueued) -> BatchResult:
        """Waits for a batch; other threads run meanwhile."""
        enqueued.done.synchronize()
        tokens = enqueued.tokens.tolist()
        logprobs = enqueued.sampled.logprob_records() if enqueued.sampled else None
        seconds = enqueued.start.elapsed_time(enqueued.done) / 1e3
        return BatchResult(enqueued.batch_id, [tokens[row] for row in enqueued.rows], logprobs, seconds)

    def _sample(self, batch: Batch, graph: StepGraph, rows: list[int]) -> Sampled | None:
        """Where the graph's greedy choice is not what was asked for, chooses again, and stores that."""
        slots = [piece.slot for piece in batch.slices if piece.sample] + batch.decode_slots
        positions = [piece.start + len(piece.tokens) for piece in batch.slices if piece.sample]
        positions += [position + 1 for position in batch.decode_positions]
        if not slots or self._sampler.plain(slots, positions):
            return None
        device = graph.logits.device
        sampled = self._sampler.sample(graph.logits[torch.tensor(rows, device=device)], slots, positions)
        where = torch.tensor([slots, positions], device=device)
        self._pool.tokens[where[0], where[1]] = sampled.tokens.int()
        return sampled


def _at_least(steps: tuple[int, ...], count: int) -> int:
    """The smallest step that holds ``count``; 0 for none."""
    return steps[bisect.bisect_left(steps, count)] if count else 0
