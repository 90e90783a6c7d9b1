"""The core's own time for one decode step, with a runner that answers at once.

    python benchmarks/core_step.py [--running 256] [--steps 2000] [--prompt 128]

A step is one BatchDone for all running requests and the Launch and Emit that it gives. Rules that need a latency model
have an H200's, by the roofline.
"""

import argparse
import gc
import time

from tidegate.base.batch import BatchResult
from tidegate.base.events import Arrived, BatchDone, LaneReady, Launch
from tidegate.base.request import RequestSpec
from tidegate.core.config import CoreConfig
from tidegate.core.core import Core
from tidegate.plan.hardware import GPUS
from tidegate.plan.roofline import roofline
from tidegate.plan.shapes import KNOWN
from tidegate.policy.modes import MODES
from tidegate.slo.goodput import Slo


def measure(mode: str, running: int, steps: int, prompt: int) -> list[float]:
    """Seconds of each step, with all requests decoding."""
    longest = 2 * steps + running  # by then all decode, however slowly a rule lets prompts in
    max_len = prompt + longest + 32
    core = Core(
        CoreConfig(
            num_blocks=running * (max_len // 16 + 2),
            block_size=16,
            max_num_seqs=running,
            max_model_len=max_len,
            vocab_size=50000,
            max_num_batched_tokens=running * prompt,
            slice_seconds=1e6,
            mode=mode,
            slo=Slo(0.5, 0.025),
            latency=roofline(KNOWN["llama-3.1-8b"], GPUS["h200"]),
        )
    )
    for lane in MODES[mode].lanes:
        core.on_event(LaneReady(lane.name), 0.0)
    pending = []
    for i in range(running):
        spec = RequestSpec(f"request-{i}", [(i * 7919 + j) % 50000 for j in range(prompt)], longest)
        pending += [a for a in core.on_event(Arrived(spec), 0.0) if isinstance(a, Launch)]
    times: list[float] = []
    now = 0.0
    while len(times) < steps:
        launch = pending.pop(0)
        batch = launch.batch
        event = BatchDone(launch.lane, BatchResult(batch.id, [7] * batch.num_sampled, None, 0.01))
        now += 0.01
        start = time.perf_counter()
        actions = core.on_event(event, now)
        elapsed = time.perf_counter() - start
        if len(batch.decode_slots) == running:
            times.append(elapsed)
        pending += [a for a in actions if isinstance(a, Launch)]
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--prompt", type=int, default=128)
    arguments = parser.parse_args()
    gc.freeze()
    print(f"{arguments.running} running requests, {arguments.steps} steps, microseconds a step")
    print(f"{'mode':<14} {'mean':>7} {'p50':>7} {'p99':>7} {'max':>7}")
    for mode in MODES:
        times = sorted(t * 1e6 for t in measure(mode, arguments.running, arguments.steps, arguments.prompt))
        mean = sum(times) / len(times)
        row = (mean, times[len(times) // 2], times[int(len(times) * 0.99)], times[-1])
        print(f"{mode:<14} " + " ".join(f"{value:7.0f}" for value in row))


if __name__ == "__main__":
    main()
