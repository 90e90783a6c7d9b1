"""One engine under a workload: the core that serves, its rules and its gate, on a virtual clock over a device that
predicts."""

import math
from collections.abc import Sequence

from tidegate.base.events import Arrived, BatchDone, BatchEnding, Emit, LaneReady, Launch
from tidegate.base.request import RequestSpec
from tidegate.core.config import CoreConfig
from tidegate.core.core import Core
from tidegate.plan.demand import Arrival
from tidegate.sim.predicted import PredictedDevice
from tidegate.slo.goodput import Latency
from tidegate.slo.latency import LatencyModel

LAUNCH_S = 0.0008  # from a launch to the start of its batch, where the lane was idle
LEAD_S = 0.0016  # before its end, a batch is announced to end
DELIVER_S = 0.0015  # from a token to its client
NOISE = 0.03  # of a batch's time


def simulate_engine(
    config: CoreConfig, truth: LatencyModel, arrivals: Sequence[Arrival], seed: int
) -> list[Latency | None]:
    """What each request experiences, in their order; None where it got no answer. Equal arguments, equal results."""
    core = Core(config)
    device = PredictedDevice(truth, NOISE, seed, LAUNCH_S)
    tokens = [1] * max(arrival.prompt_tokens for arrival in arrivals)
    times: list[list[float]] = [[] for _ in arrivals]
    now, arrived = 0.0, 0

    def happens(event: Arrived | BatchDone | BatchEnding | LaneReady) -> None:
        for action in core.on_event(event, now):
            if isinstance(action, Launch):
                device.launch(action.lane, action.batch, now)
            elif isinstance(action, Emit):
                for output in action.outputs:
                    if output.tokens:
                        times[int(output.id)].append(now)

    for lane in core.mode.lanes:
        happens(LaneReady(lane.name))
    while True:
        arrival_s = arrivals[arrived].at_s if arrived < len(arrivals) else math.inf
        end_s, warning_s = device.next_end_s(), device.next_warning_s(LEAD_S)
        first = min(arrival_s, end_s, warning_s)
        if first == math.inf:
            break
        now = max(now, first)
        if arrival_s == first:
            asked = arrivals[arrived]
            happens(Arrived(RequestSpec(str(arrived), tokens[: asked.prompt_tokens], asked.output_tokens)))
            arrived += 1
        elif warning_s == first:
            happens(BatchEnding(*device.warn(now, LEAD_S)))
        else:
            happens(BatchDone(*device.end(now)))
    return [
        Latency.of(asked.at_s - DELIVER_S, told) if len(told) == asked.output_tokens else None
        for asked, told in zip(arrivals, times, strict=True)
    ]
