"""One engine under a workload: what each of its requests experiences."""

from collections.abc import Sequence

from tidegate.core.config import CoreConfig
from tidegate.plan.demand import Arrival
from tidegate.sim.engine import Host, SimulatedEngine
from tidegate.slo.goodput import Latency
from tidegate.slo.latency import LatencyModel

HOST = Host()
NOISE = 0.03  # of a batch's time


def simulate_engine(
    config: CoreConfig, truth: LatencyModel, arrivals: Sequence[Arrival], seed: int
) -> list[Latency | None]:
    """In the order of ``arrivals``, of which no two come at the same time; None where a request got no answer. Equal
    arguments, equal results."""
    engine = SimulatedEngine(config, truth, HOST, NOISE, seed)
    for arrival in arrivals:
        engine.submit(arrival, arrival.at_s)
    engine.advance()
    by_arrival = sorted(engine.records, key=lambda served: served.arrived_s)
    return [served.latency for served in by_arrival]
