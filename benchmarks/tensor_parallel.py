"""Steps of a model that several GPUs compute together, against one GPU: random weights, bf16, without a server.

    python benchmarks/tensor_parallel.py [--ranks 1,2] [--shapes 8b,70b]

A decode step has 64 rows; a prompt of 4,096 tokens is computed in slices of 1,024, back to back. Times are wall clock
with two steps enqueued, as when serving. A shape that does not fit on so few GPUs is left out.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tidegate.base.batch import Batch, Slice, TableUpdate
from tidegate.base.specs import PoolSpec, Shard
from tidegate.device.green_contexts import SmParts
from tidegate.device.places import FORMS, Places
from tidegate.models.shards import divide
from tidegate.models.sources import open_model
from tidegate.node import wire
from tidegate.node.config import EngineConfig
from tidegate.node.gpu_rank import GpuRank
from tidegate.node.lead import Lead, LeadingRunner
from tidegate.node.rank_processes import RankProcesses
from tidegate.runner.lane_runner import LaneRunner, Pending
from tidegate.runner.shapes import shape_for

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
}  # fmt: skip
SHAPES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
WEIGHT_GB = {"8b": 16, "70b": 141}
LARGEST_GB = 90  # of weights a GPU, beside the KV of the longest contexts
ROWS, CONTEXTS, PROMPT, SLICE = 64, (1024, 4096), 4096, 1024
BLOCK, DTYPE = 16, "bfloat16"
PER_SLOT = -(-(max(CONTEXTS) + 64) // BLOCK)
ARRAYS = PoolSpec((ROWS + 1) * PER_SLOT + 1, BLOCK, ROWS + 2, PER_SLOT * BLOCK - 1, DTYPE)
MakeBatch = Callable[[int], Batch]


class Bench:
    def __init__(self, config: EngineConfig, meeting_place: str) -> None:
        ranks = config.tensor_parallel_size
        source = open_model(config.model, "dummy")
        self.others = RankProcesses(ranks)
        if ranks > 1:
            self.others.watch(give_up)
        self.others.begin(lambda rank: wire.RankInit(config, rank, DTYPE, ARRAYS, "disjoint", True, meeting_place))
        rank = GpuRank(source, divide(source.spec, Shard(0, ranks)), DTYPE, meeting_place if ranks > 1 else None)
        weights, pool = rank.load(rank.allocate(ARRAYS), lambda fraction: None)
        make = rank.runners(weights, pool, eager=False)
        self.runner: LaneRunner = LeadingRunner("D", lambda lane: make(lane, None), Lead(self.others.tell))
        self.place = Places(SmParts(), FORMS["disjoint"]).of("D", 1.0)
        self.table = pool.table

    def scatter(self) -> list[TableUpdate]:
        """Every slot's blocks, for the first batch; rank 0's block table is the caller's to write."""
        blocks = np.random.default_rng(0).permutation(ARRAYS.num_blocks - 1).astype(np.int32)
        updates = []
        for slot in range(ROWS + 1):
            own = blocks[slot * PER_SLOT : (slot + 1) * PER_SLOT]
            self.table.numpy()[slot, :PER_SLOT] = own
            updates.append(TableUpdate(slot, 0, own.tolist()))
        return updates

    def milliseconds(self, make: MakeBatch, count: int) -> float:
        """Of a step."""
        shape = make(0)
        self.runner.prepare(shape_for(shape.num_prefill_tokens, len(shape.decode_slots)), self.place)
        self._run(make, max(3, count // 4))
        start = time.perf_counter()
        self._run(make, count)
        return (time.perf_counter() - start) / count * 1e3

    def _run(self, make: MakeBatch, count: int) -> None:
        pending: list[Pending] = []
        for i in range(count):
            pending.append(self.runner.enqueue(make(i), self.place))
            if len(pending) == 2:
                pending.pop(0).collect()
        for enqueued in pending:
            enqueued.collect()


def give_up(reason: str, config: bool) -> None:
    """Rank 0 would wait for the lost rank forever."""
    print(reason, flush=True)
    os._exit(1)


def decode(context: int) -> MakeBatch:
    return lambda i: Batch(i, 1.0, [], list(range(ROWS)), [context + i] * ROWS, [], [])


def prefill(i: int) -> Batch:
    start = i * SLICE % PROMPT
    return Batch(i, 1.0, [Slice(ROWS, start, list(range(1000, 1000 + SLICE)), start + SLICE == PROMPT)], [], [], [], [])


def measure(shape: str, ranks: int) -> None:
    """Prints one row."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(LLAMA | SHAPES[shape]))
        config = EngineConfig(str(path), load_format="dummy", device="cuda", tensor_parallel_size=ranks)
        bench = Bench(config, folder)
        tables = bench.scatter()
        bench.runner.enqueue(Batch(0, 1.0, [], [0], [0], tables, []), bench.place).collect()
        steps = [bench.milliseconds(decode(context), 30) for context in CONTEXTS]
        slices = bench.milliseconds(prefill, 16)
        columns = "".join(f"{step:>12.2f} ms" for step in steps)
        print(f"{shape:<6}{ranks:>5}{columns}{SLICE / slices * 1e3:>14,.0f}", flush=True)
        bench.others.close()
    sys.stdout.flush()
    os._exit(0)  # communicators have nobody to say goodbye to


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2", help="numbers of GPUs (default: 1,2)")
    parser.add_argument("--shapes", default="8b,70b", help=f"of {', '.join(SHAPES)} (default: all)")
    parser.add_argument("--one", nargs=2, metavar=("SHAPE", "RANKS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        measure(arguments.one[0], int(arguments.one[1]))
    heads = "".join(f"{f'decode, {context:,}':>15}" for context in CONTEXTS)
    print(f"{'shape':<6}{'GPUs':>5}{heads}{'prefill tok/s':>14}", flush=True)
    for shape in arguments.shapes.split(","):
        for ranks in map(int, arguments.ranks.split(",")):
            if WEIGHT_GB[shape] / ranks > LARGEST_GB:
                print(f"{shape:<6}{ranks:>5}   does not fit", flush=True)
                continue
            # In a process of its own: memory for weights and KV is kept until the process ends.
            subprocess.run([sys.executable, __file__, "--one", shape, str(ranks)], check=False)


if __name__ == "__main__":
    main()
