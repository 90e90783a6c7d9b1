"""Runs a lane's batches kernel by kernel, where a step can't be one graph: right on any device, and slower."""

import torch

from tidegate.base.batch import Batch
from tidegate.base.specs import ModelSpec
from tidegate.device.places import Place
from tidegate.device.pool import Pool
from tidegate.kernels.choose_attention import attention_over
from tidegate.kernels.collectives import Collectives
from tidegate.kernels.torch_attention import TorchAttention
from tidegate.models.fp8_weights import kv_scales
from tidegate.models.registry import build_model
from tidegate.runner.lane_runner import Enqueued, Mark, mark
from tidegate.runner.runner import Runner
from tidegate.runner.shapes import StepShape


def plain_attention() -> None:
    """Makes torch compute attention by plain products and a softmax in this process: its fused kernels take only some
    masks, groups and types, and differ between shapes."""
    torch.backends.cuda.enable_math_sdp(True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


class EagerRunner:
    """Implements ``LaneRunner``. Nothing is prepared: any step can start anywhere. Nothing is fused."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._last: Mark | None = None

    @classmethod
    def over(
        cls, spec: ModelSpec, weights: dict[str, torch.Tensor], pool: Pool, collectives: Collectives | None = None
    ) -> "EagerRunner":
        attention = attention_over(TorchAttention, spec, pool.kv, pool.table, kv_scales(spec, weights))
        model = build_model(spec, weights, attention, collectives=collectives)
        return cls(Runner(model, attention, pool, spec, collectives))

    @property
    def hybrid_attention(self) -> dict[str, int]:
        return {}

    def prepared(self, shape: StepShape, place: Place) -> bool:
        return True

    def prepare(self, shape: StepShape, place: Place) -> None:
        pass

    def enqueue(self, batch: Batch, place: Place) -> Enqueued:
        with torch.cuda.stream(place.stream):  # no stream: does nothing
            if place.stream is not None and isinstance(self._last, torch.cuda.Event):
                place.stream.wait_event(self._last)  # the lane's batch before may have run in another place
            start = mark(place)
            sampled = self._runner.launch(batch)
            if sampled is not None:
                sampled = sampled.to_host()
            self._last = done = mark(place)
        tokens = sampled.tokens if sampled is not None else torch.empty(0, dtype=torch.int64)
        return Enqueued(batch.id, start, done, tokens, list(range(len(tokens))), sampled)
