"""Small engines and requests for tests of the simulator."""

from typing import NamedTuple

from tidegate.core.config import CoreConfig
from tidegate.sim.engine import Host, SimulatedEngine
from tidegate.slo.goodput import Slo
from tidegate.slo.latency import Costs, LatencyModel, rough

SLO = Slo(0.2, 0.03)
MODEL = rough(20_000.0)


class Asked(NamedTuple):
    prompt_tokens: int
    output_tokens: int


def config(mode="chunked", **more):
    values = {
        "num_blocks": 200,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_model_len": 400,
        "vocab_size": 2,
        "max_num_batched_tokens": 64,
        "prefix_caching": False,
        "slice_seconds": 0.02,
        "min_slice_tokens": 8,
        "slice_quantum_tokens": 8,
        "prefill_tokens_per_s": 20_000.0,
        "latency": MODEL,
        "slo": SLO,
        "mode": mode,
    }
    return CoreConfig(**values | more)


AT_ONCE = Host(0.0, 0.0, 0.0)


def engine(mode="chunked", truth=MODEL, host=AT_ONCE, noise=0.0, seed=0, one_by_one=False, **more):
    return SimulatedEngine(config(mode, **more), truth, host, noise, seed, one_by_one)


def constant(seconds):
    """Every batch takes so long."""
    return LatencyModel(Costs((1, 2), (seconds, seconds), 0.0, 0.0, 0.0))
