"""Runs a lane's batches on a GPU: each is one graph, enqueued without waiting for the one before it."""

import logging
import os
import threading

import numpy as np
import torch

from tidegate.base.batch import Batch
from tidegate.base.specs import ModelSpec
from tidegate.device.places import Place
from tidegate.device.pool import Pool
from tidegate.kernels import pod_attention
from tidegate.kernels.choose_attention import graph_kernels
from tidegate.kernels.collectives import Collectives
from tidegate.kernels.flashinfer_attention import SwitchedAttention, Workspace, scratch_bytes
from tidegate.kernels.fp8 import E4M3, unit_scales
from tidegate.kernels.host_copies import to_device, to_host
from tidegate.kernels.pod_rule import APART, POD, HybridWork, PodRule
from tidegate.kernels.step_rows import Types
from tidegate.models.fp8_weights import kv_scales
from tidegate.models.registry import build_model
from tidegate.runner.lane_runner import Enqueued
from tidegate.runner.sampler import Sampled, Sampler
from tidegate.runner.shapes import MAX_SLICES, PADDING, TOKEN_STEPS, Scratch, StepShape, held_by, shape_for
from tidegate.runner.step_graph import BlockLists, Staging, StepGraph

CAPTURE = threading.Lock()  # CUDA takes one capture at a time

log = logging.getLogger("tidegate.runner")


class GpuRunner:
    """Implements ``LaneRunner``. Graphs of all shapes and places share one pool of memory and the same workspaces: a
    lane's steps run one after another, wherever they run."""

    def __init__(
        self, spec: ModelSpec, weights: dict[str, torch.Tensor], pool: Pool, scratch: Scratch,
        pod_rule: PodRule | None = None, collectives: Collectives | None = None,
    ) -> None:  # fmt: skip
        """``pod_rule``: which of the batches that may be fused are; without one, none is."""
        if spec.latent is None:
            # Without memory of its own cuBLAS takes no kernels that count their tiles or add up parts of a product.
            # These begin by filling it, which holds up a graph for 6 us, and are no faster for it. Where attention is
            # latent, decode steps were an eighth longer without: benchmarks/gpu.md.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":0:0")
        self._spec, self._pool, self._scratch = spec, pool, scratch
        self._table = pool.table.numpy()
        self._attention = SwitchedAttention()
        self._model = build_model(spec, weights, self._attention, collectives=collectives)
        self._collectives = collectives
        self._sampler = Sampler(pool.tokens, spec.vocab_size)
        self._types = Types(weights["embed"].dtype, pool.kv.dtype)
        scales = kv_scales(spec, weights) if pool.kv.dtype == E4M3 else unit_scales(spec.num_layers)
        self._kernels = graph_kernels(spec, self._types, scales)
        self._sms = torch.cuda.get_device_properties(pool.kv.device).multi_processor_count
        most_rows = PADDING.padded_rows(shape_for(0, pool.spec.max_num_seqs - 1).decodes)
        self._scratch_bytes = scratch_bytes(spec, self._types, TOKEN_STEPS[-1], MAX_SLICES, self._sms, most_rows)
        partial = torch.empty(self._scratch_bytes, dtype=torch.uint8, device=pool.kv.device)
        self._workspaces = Workspace(partial), Workspace(partial)
        self._lists = BlockLists(most_rows, pool.spec.max_blocks_per_seq, pool.kv.device)
        self._staging = Staging()
        self._side = torch.cuda.Stream(pool.kv.device) if self._kernels.share_no_memory else None
        self._memory = torch.cuda.graph_pool_handle()
        self._graphs: dict[tuple[StepShape, Place], StepGraph] = {}
        self._warm: set[StepShape] = set()  # shapes whose kernels have run, somewhere
        self._pod_rule = pod_rule
        self._told = False  # that there is no rule, though batches ask
        self._hybrid_attention = {} if pod_rule is None else {APART: 0, POD: 0}
        self._last: torch.cuda.Event | None = None  # recorded behind the lane's last batch

    @property
    def hybrid_attention(self) -> dict[str, int]:
        return self._hybrid_attention.copy()

    def prepared(self, shape: StepShape, place: Place) -> bool:
        return (shape, place) in self._graphs

    def prepare(self, shape: StepShape, place: Place) -> None:
        """Captures the shape's graph, unless it is there. Waits for the lane's batches only when the shape is new
        everywhere; otherwise nothing runs on the device, and no buffer that a batch may be using is touched."""
        self._graph(shape, place)

    @torch.inference_mode()
    def enqueue(self, batch: Batch, place: Place) -> Enqueued:
        graph = self._graph(shape_for(batch.num_prefill_tokens, len(batch.decode_slots)), place)
        self._sampler.apply(batch.setups)
        stream = _stream(place)
        with torch.cuda.stream(stream):
            if self._last is not None:
                stream.wait_event(self._last)  # the lane's batch before may have run in another place
            start = torch.cuda.Event(enable_timing=True)
            done = torch.cuda.Event(enable_timing=True)
            start.record(stream)
            for piece in batch.slices:
                if piece.history:
                    history = to_device(np.array(piece.history, dtype=np.int32), graph.tokens.device)
                    self._pool.tokens[piece.slot, : len(history)].copy_(history)
            rows = graph.load(batch, self._table, self._form(batch, graph))
            graph.replay()
            sampled = self._sample(batch, graph, rows)
            if sampled is None:
                tokens = to_host(graph.tokens)
            else:
                sampled = sampled.to_host()
                tokens, rows = sampled.tokens, list(range(len(rows)))
            done.record(stream)
        self._last = done
        return Enqueued(batch.id, start, done, tokens, rows, sampled)

    @torch.inference_mode()
    def _graph(self, shape: StepShape, place: Place) -> StepGraph:
        graph = self._graphs.get((shape, place))
        if graph is not None:
            return graph
        stream, there = _stream(place), place.capture_stream
        assert there is not None
        with CAPTURE, torch.cuda.stream(there):
            if (shape, place) in self._graphs:  # by now
                return self._graphs[shape, place]
            graph = StepGraph(
                self._spec, self._model, self._attention, self._kernels, self._types, self._pool, shape, self._scratch,
                self._workspaces, self._lists, self._staging, self._may_be_pod(shape),
                side=self._side if place.part is None else None,
            )  # fmt: skip
            if shape not in self._warm:
                if self._last is not None:
                    self._last.synchronize()  # the workspaces are about to be used
                graph.warm_up()
                there.synchronize()
                torch.cuda.empty_cache()  # what it took lies idle: captured steps have memory of their own
                self._warm.add(shape)
            graph.capture(self._memory)
            stream.wait_stream(there)  # the graph's buffers have been filled there
            self._graphs[shape, place] = graph
        return graph

    def _may_be_pod(self, shape: StepShape) -> bool:
        """Whether attention in one kernel can be faster for a batch of this shape, and its workspace suffices."""
        if self._pod_rule is None or not shape.hybrid or not self._pod_rule.may_win(*held_by(shape)):
            return False
        needed = pod_attention.scratch_bytes(self._spec, shape.prefill_tokens, MAX_SLICES, shape.decodes, self._sms)
        return sum(needed) <= self._scratch_bytes

    def _form(self, batch: Batch, graph: StepGraph) -> str:
        """Of the batch's attention."""
        if not batch.fused or not batch.hybrid:
            return APART
        if self._pod_rule is None:
            if not self._told:
                log.warning(
                    "attention of prompts and decodes runs in two kernels: this lane was started without the one"
                )
            self._told = True
            return APART
        form = POD if POD in graph.forms and self._pod_rule.wins(HybridWork.of(batch)) else APART
        self._hybrid_attention[form] += 1
        return form

    def _sample(self, batch: Batch, graph: StepGraph, rows: list[int]) -> Sampled | None:
        """Where the graph's greedy choice is not what was asked for, chooses again, and stores that."""
        slots = [piece.slot for piece in batch.slices if piece.sample] + batch.decode_slots
        positions = [piece.start + len(piece.tokens) for piece in batch.slices if piece.sample]
        positions += [position + 1 for position in batch.decode_positions]
        if not slots or self._sampler.plain(slots, positions):
            return None
        device = graph.logits.device
        sampled = self._sampler.sample(graph.logits[to_device(np.array(rows), device)], slots, positions)
        if self._collectives is not None:
            self._collectives.first(sampled.tokens)  # sums of probabilities may differ between ranks in the last bit
        where = to_device(np.array([slots, positions]), device)
        self._pool.tokens[where[0], where[1]] = sampled.tokens.int()
        return sampled


def _stream(place: Place) -> torch.cuda.Stream:
    assert place.stream is not None
    return place.stream
