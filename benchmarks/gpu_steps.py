"""Single steps on one GPU, without a server: decode, prefill slices, hybrid steps, and both lanes side by side.

    python benchmarks/gpu_steps.py [--config CONFIG.json] [decode] [prefill] [hybrid] [sides]

Random weights of the Llama-3-8B shape unless a config.json is given. Times are wall clock a step with two steps
enqueued, as when serving; "device" is what events on the stream measured.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tidegate.base.batch import Batch, Slice
from tidegate.base.specs import PoolSpec
from tidegate.device.gpu_memory import GpuMemory
from tidegate.device.green_contexts import Part, SmParts
from tidegate.device.memory import lay_out
from tidegate.models.sources import open_model
from tidegate.models.weights import layout
from tidegate.runner.gpu_runner import Enqueued, GpuRunner
from tidegate.runner.step_graph import Scratch, StepShape

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
}  # fmt: skip
NUM_BLOCKS, MAX_SEQS, MAX_LEN = 40000, 256, 8192
DECODES, PROMPT = 64, 4096
MakeBatch = Callable[[int], Batch]


class Bench:
    def __init__(self, config: str) -> None:
        source = open_model(config, "dummy")
        arrays = PoolSpec(NUM_BLOCKS + 1, 16, MAX_SEQS + 1, MAX_LEN, "bfloat16")
        stored = {name: ("bfloat16", shape) for name, shape in layout(source.spec).items()}
        regions, num_bytes = lay_out(source.spec, arrays, stored)
        self.memory = GpuMemory(num_bytes)
        weights, self.pool = self.memory.open_pool(arrays, regions)
        source.load(weights, lambda fraction: None)
        self.pool.kv.normal_()
        self.parts = SmParts()
        self.scratch = Scratch(NUM_BLOCKS, MAX_SEQS)
        self._model = source.spec, weights
        self.table = self.pool.table.numpy()
        blocks = np.random.default_rng(0).permutation(NUM_BLOCKS).astype(np.int32)
        for slot in range(DECODES + 1):  # scattered blocks, 512 a slot
            self.table[slot, :512] = blocks[slot * 512 : (slot + 1) * 512]
        self.runner = self.new_runner()

    def new_runner(self) -> GpuRunner:
        return GpuRunner(*self._model, self.pool, self.scratch, self.parts)

    def steps(self, make: MakeBatch, count: int, part: Part) -> tuple[float, float]:
        """Milliseconds a step: wall clock, and the median on the device."""
        pending: list[Enqueued] = []
        device = []
        start = time.perf_counter()
        for i in range(count):
            pending.append(self.runner.enqueue(make(i), self.table, part))
            if len(pending) == 2:
                device.append(self.runner.collect(pending.pop(0)).seconds)
        device += [self.runner.collect(enqueued).seconds for enqueued in pending]
        return (time.perf_counter() - start) / count * 1e3, sorted(device)[count // 2] * 1e3

    # ---- batches

    def decode(self, context: int) -> MakeBatch:
        slots = list(range(DECODES))
        return lambda i: Batch(i, 1.0, [], slots, [context + i] * DECODES, [], [])

    def prefill(self, tokens: int) -> MakeBatch:
        return lambda i: Batch(i, 1.0, [self._slice(i, tokens)], [], [], [], [])

    def hybrid(self, tokens: int, context: int) -> MakeBatch:
        slots = list(range(DECODES))
        return lambda i: Batch(i, 1.0, [self._slice(i, tokens)], slots, [context + i] * DECODES, [], [])

    def _slice(self, i: int, tokens: int) -> Slice:
        start = i * tokens % PROMPT
        return Slice(DECODES, start, list(range(1000, 1000 + tokens)), start + tokens == PROMPT)

    # ---- tables

    def table_decode(self) -> None:
        for context in (1024, 4096, 7900):
            self.steps(self.decode(context), 3, self.parts.whole)
            wall, device = self.steps(self.decode(context), 30, self.parts.whole)
            print(f"decode {DECODES} rows, context {context}: {wall:.2f} ms a step (device {device:.2f})", flush=True)

    def table_prefill(self) -> None:
        for tokens in (128, 256, 512, 1024, 2048):
            count = max(PROMPT // tokens, 8)
            self.steps(self.prefill(tokens), count, self.parts.whole)
            wall, _ = self.steps(self.prefill(tokens), 2 * count, self.parts.whole)
            print(f"prefill of {PROMPT} in slices of {tokens}: {tokens / wall * 1e3:,.0f} tokens/s", flush=True)

    def table_hybrid(self) -> None:
        for tokens in (128, 256, 512, 1024):
            self.steps(self.hybrid(tokens, 1024), 4, self.parts.whole)
            wall, _ = self.steps(self.hybrid(tokens, 1024), 24, self.parts.whole)
            rate = tokens / wall * 1e3
            what = f"hybrid, {DECODES} decodes and {tokens} prompt tokens"
            print(f"{what}: {wall:.2f} ms, {rate:,.0f} prompt tokens/s", flush=True)

    def table_sides(self) -> None:
        """Disjoint parts, and decode on the whole device with prefill capped."""
        sys.setswitchinterval(2e-4)
        other = self.new_runner()
        for context in (1024, 4096):
            for disjoint in (True, False):
                for sms in (104, 88, 72, 56, 40):
                    first, rest = self.parts.pair(sms / self.parts.total)
                    ours = rest if disjoint else self.parts.whole
                    tokens = 1024 if sms > 60 else 512
                    other.prepare(StepShape(tokens, 0), first)
                    self.runner.prepare(StepShape(0, DECODES), ours)
                    wall, rate = self._beside(other, tokens, first, self.decode(context), ours)
                    print(
                        f"context {context}, prefill on {first.sms} SMs, decode on {ours.sms}: "
                        f"decode {wall:.2f} ms, prefill {rate:,.0f} tokens/s", flush=True,
                    )  # fmt: skip

    def _beside(self, other: GpuRunner, tokens: int, part: Part, decode: MakeBatch, ours: Part) -> tuple[float, float]:
        stop, done = threading.Event(), [0]

        def prefill() -> None:
            make, pending, i = self.prefill(tokens), list[Enqueued](), 0
            while not stop.is_set():
                pending.append(other.enqueue(make(i), self.table, part))
                i += 1
                if len(pending) == 2:
                    other.collect(pending.pop(0))
                    done[0] += tokens
            for enqueued in pending:
                other.collect(enqueued)

        thread = threading.Thread(target=prefill)
        thread.start()
        time.sleep(0.15)
        self.steps(decode, 4, ours)
        before, start = done[0], time.perf_counter()
        wall, _ = self.steps(decode, 50, ours)
        rate = (done[0] - before) / (time.perf_counter() - start)
        stop.set()
        thread.join()
        return wall, rate


def main() -> None:
    tables = ("decode", "prefill", "hybrid", "sides")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="a model's config.json")
    parser.add_argument("tables", nargs="*", choices=[*tables, []], default=list(tables))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = arguments.config
        if config is None:
            config = str(Path(folder) / "config.json")
            Path(config).write_text(json.dumps(LLAMA_3_8B))
        bench = Bench(config)
    for table in arguments.tables:
        getattr(bench, f"table_{table}")()


if __name__ == "__main__":
    main()
