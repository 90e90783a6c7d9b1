"""How long simulations take, and how that grows with the number of devices.

    python benchmarks/sim_speed.py [--truth MODEL] [--num-requests 100000] [--rate 20] [--mode chunked,auto]
                                   [--engines 1,10,100,1000] [--router round-robin] [--one-by-one]

``--truth`` as in ``tidegate simulate``. Requests are of the workload ``conv``; ``--rate`` is for each engine, and the
number of requests is the same for any number of engines. Times are of this process on its core, without drawing the
requests. ``--one-by-one`` takes every step through the core. The last column is the time of 10 million rounds of an
empty loop, measured beside: it tells machines, and moments of a busy machine, apart.
"""

import argparse
import gc
import itertools
import resource
import time

from tidegate.bench.plan import arrivals
from tidegate.bench.simulate import load_model
from tidegate.bench.workloads import WORKLOADS
from tidegate.core.config import CoreConfig
from tidegate.sim.engine import Host, SimulatedEngine
from tidegate.sim.fleet import ROUTERS, serve
from tidegate.slo.goodput import Slo, attainment
from tidegate.slo.latency import LatencyModel

SLO = Slo(0.5, 0.025)


def config(mode: str, model: LatencyModel) -> CoreConfig:
    """Of a GPU as in ``tidegate simulate``."""
    return CoreConfig(
        num_blocks=55_000,
        block_size=16,
        max_num_seqs=256,
        max_model_len=16_384,
        vocab_size=0,
        max_num_batched_tokens=8192,
        max_prefill_tokens=2048,
        mode=mode,
        order="slack",
        prefix_caching=False,
        max_waiting=1 << 30,
        slo=SLO,
        latency=model,
        slice_seconds=0.03,
        min_slice_tokens=128,
        slice_quantum_tokens=64,
        max_slices=16,
        padding=model.whole.padding,
        prefill_tokens_per_s=2048 / model.whole.dense(2048),
    )


def loop_s() -> float:
    start = time.process_time()
    for _ in range(10_000_000):
        pass
    return time.process_time() - start


def measure(arguments: argparse.Namespace, model: LatencyModel, mode: str, count: int) -> None:
    requests = list(itertools.islice(arrivals(WORKLOADS["conv"], arguments.rate * count, 0), arguments.num_requests))
    made = config(mode, model)
    gc.collect()
    gc.disable()
    loop, start, wall = loop_s(), time.process_time(), time.perf_counter()
    engines = [
        SimulatedEngine(made, model, Host(), noise=0.03, seed=i, one_by_one=arguments.one_by_one) for i in range(count)
    ]
    serve(requests, engines, arguments.router)
    seconds, wall = time.process_time() - start, time.perf_counter() - wall
    steps = sum(lane.batches for engine in engines for lane in engine.core.stats().lanes.values())
    attained = attainment([one.latency for engine in engines for one in engine.records], SLO)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    total = arguments.num_requests
    print(
        f"{mode:<14} {count:>7} {total:>9,} {steps:>10,} {seconds:>7.1f} {wall:>7.1f} {seconds / total * 1e6:>11.0f}"
        f" {seconds / steps * 1e6:>8.1f} {attained:>8.1%} {memory:>9,.0f} {loop:>6.2f}",
        flush=True,
    )
    gc.enable()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", default="rough:40000")
    parser.add_argument("--num-requests", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--mode", default="chunked,auto")
    parser.add_argument("--engines", default="1,10,100,1000")
    parser.add_argument("--router", default="round-robin", choices=sorted(ROUTERS))
    parser.add_argument("--one-by-one", action="store_true")
    arguments = parser.parse_args()
    model = load_model(arguments.truth)
    print(
        f"{'mode':<14} {'engines':>7} {'requests':>9} {'steps':>10} {'CPU s':>7} {'wall s':>7} {'µs/request':>11}"
        f" {'µs/step':>8} {'attained':>8} {'peak MiB':>9} {'loop s':>6}"
    )
    for mode in arguments.mode.split(","):
        for count in arguments.engines.split(","):
            measure(arguments, model, mode, int(count))


if __name__ == "__main__":
    main()
