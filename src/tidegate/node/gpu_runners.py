"""What a lane on a GPU is made of, in whichever process it runs: its runner, and the count of its SMs."""

from collections.abc import Callable
from typing import Protocol

import torch

from tidegate.base.specs import ModelSpec
from tidegate.device.places import Place
from tidegate.device.pool import Pool
from tidegate.kernels.collectives import Collectives
from tidegate.node.backend import Progress
from tidegate.runner.lane_runner import LaneRunner
from tidegate.runner.shapes import Scratch


class MakeRunner(Protocol):
    def __call__(self, fused_in: Place | None, collectives: Collectives | None = None) -> LaneRunner: ...


def runner_maker(
    spec: ModelSpec,
    weights: dict[str, torch.Tensor],
    pool: Pool,
    eager: bool,
    progress: Progress = lambda stage, fraction: None,
) -> "MakeRunner":
    """Makes a lane's runner; where it may fuse attention, measured first in the place that is given. What only one kind
    needs is imported when that kind is chosen. The pool's last block and slot are for padding."""
    torch.set_float32_matmul_precision("highest")  # float32 means float32
    if eager:
        from tidegate.runner.eager_runner import EagerRunner, plain_attention

        plain_attention()
        return lambda fused_in, collectives=None: EagerRunner.over(spec, weights, pool, collectives)
    from tidegate.runner.gpu_runner import GpuRunner
    from tidegate.runner.pod_trial import rule_for

    scratch = Scratch(pool.spec.num_blocks - 1, pool.spec.max_num_seqs - 1)

    def make(fused_in: Place | None, collectives: Collectives | None = None) -> LaneRunner:
        rule = None
        if fused_in is not None:
            progress("measuring attention in one kernel and in two", 0.0)
            rule = rule_for(spec, pool.kv, fused_in)
            progress(f"attention of prompts and decodes: {rule or 'two kernels'}", 1.0)
        return GpuRunner(spec, weights, pool, scratch, rule, collectives)

    return make


def count_sms(place: Place) -> Callable[[], int]:
    """Enqueues a kernel that finds the SMs of a place; what is returned tells their number, 0 until it is known."""
    try:
        from tidegate.kernels.triton_sm_ids import SmIds
    except ImportError:
        return lambda: 0
    assert place.stream is not None
    ids = SmIds(place.stream)
    return lambda: len(ids.known() or ())
