"""What a lane on a GPU is made of, in whichever process it runs: its runner, and the count of its SMs."""

from collections.abc import Callable

import torch

from tidegate.base.specs import ModelSpec
from tidegate.device.places import Place
from tidegate.device.pool import Pool
from tidegate.runner.lane_runner import LaneRunner
from tidegate.runner.shapes import Scratch


def runner_maker(
    spec: ModelSpec, weights: dict[str, torch.Tensor], pool: Pool, eager: bool
) -> Callable[[], LaneRunner]:
    """Makes a lane's runner. What only one kind needs is imported when that kind is chosen. The pool's last block and
    slot are for padding."""
    torch.set_float32_matmul_precision("highest")  # float32 means float32
    if not eager:
        from tidegate.runner.gpu_runner import GpuRunner

        scratch = Scratch(pool.spec.num_blocks - 1, pool.spec.max_num_seqs - 1)
        return lambda: GpuRunner(spec, weights, pool, scratch)
    from tidegate.runner.eager_runner import EagerRunner, plain_attention

    plain_attention()
    return lambda: EagerRunner.over(spec, weights, pool)


def count_sms(place: Place) -> Callable[[], int]:
    """Enqueues a kernel that finds the SMs of a place; what is returned tells their number, 0 until it is known."""
    try:
        from tidegate.kernels.triton_sm_ids import SmIds
    except ImportError:
        return lambda: 0
    assert place.stream is not None
    ids = SmIds(place.stream)
    return lambda: len(ids.known() or ())
