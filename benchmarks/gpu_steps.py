"""Single steps on one GPU, without a server: decode, prefill slices, hybrid steps, both lanes side by side, and the
frontier: what prefill and decode can have together, by every chunk size and in every form of sharing.

    python benchmarks/gpu_steps.py [--shape NAME | --config CONFIG.json] [decode] [prefill] [hybrid] [sides]
    python benchmarks/gpu_steps.py frontier [--json FILE] [--plot FILE.png]
    python benchmarks/gpu_steps.py rotation
    python benchmarks/gpu_steps.py --quantization fp8 --kv-cache-dtype fp8 decode prefill

The frontier has lanes as processes (MPS) too, where that can be had; "rotation" is what a change of their shares costs.
Random weights of a model's shape: Llama-3-8B's unless another is named or a config.json is given. Times are wall clock
a step with two steps enqueued, as when serving; "device" is what events on the stream measured.
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
import torch
from frontier_report import Limits, Point, line, plot, save
from model_shapes import SHAPES
from mps_sides import MpsSides

from tidegate.base.batch import Batch, Slice
from tidegate.base.specs import PoolSpec
from tidegate.device.gpu_memory import GpuMemory
from tidegate.device.green_contexts import SmParts
from tidegate.device.memory import SharedMemory, lay_out, region_bytes, table_region
from tidegate.device.mps import why_not
from tidegate.device.places import FORMS, Place, Places
from tidegate.kernels.pod_rule import PodRule
from tidegate.models.linears import load, stored, stored_bytes
from tidegate.models.sources import open_model
from tidegate.runner.gpu_runner import GpuRunner
from tidegate.runner.lane_runner import Enqueued
from tidegate.runner.shapes import TOKEN_STEPS, Scratch, StepShape

NUM_BLOCKS, MAX_SEQS, MAX_LEN = 34000, 256, 8192
DECODES, PROMPT = 64, 4096
PREFILL_SMS = (104, 88, 72, 56, 40)
CONTEXTS = (1024, 4096, 7900)
MakeBatch = Callable[[int], Batch]
WHY_NO_MPS = why_not()  # asked before the GPU is used


class Bench:
    def __init__(self, config: str, quantization: str | None = None, kv_dtype: str = "bfloat16") -> None:
        source = open_model(config, "dummy")
        arrays = PoolSpec(NUM_BLOCKS + 1, 16, MAX_SEQS + 1, MAX_LEN, kv_dtype)
        self.regions, num_bytes = lay_out(source.spec, arrays, stored(source.spec, quantization, "bfloat16"))
        self.memory = GpuMemory(num_bytes)
        where = table_region(self.regions)
        self.table = SharedMemory.create(region_bytes(where))
        weights, self.pool = self.memory.open_pool(arrays, self.regions, self.table.tensor(where))
        load(source, weights)
        for layer in self.pool.kv:
            layer.copy_(torch.randn(layer.shape, dtype=torch.bfloat16, device=layer.device))
        torch.cuda.empty_cache()
        self.pool.tokens.random_(source.spec.vocab_size)  # different ones: equal tokens go to the same experts
        token_bytes = source.spec.kv_elements_per_token * self.pool.kv.dtype.itemsize
        weight_gib = stored_bytes(source.spec, quantization, "bfloat16") / 2**30
        print(
            f"weights {weight_gib:.1f} GiB ({quantization or 'bfloat16'}), KV {token_bytes} bytes a token ({kv_dtype})"
        )
        self.parts = SmParts()
        self.scratch = Scratch(NUM_BLOCKS, MAX_SEQS)
        self.spec = source.spec
        self._weights = weights
        self.places = {name: Places(self.parts, form) for name, form in FORMS.items()}
        self.whole = self.places["disjoint"].of("D", 1.0)
        table = self.pool.table.numpy()
        blocks = np.random.default_rng(0).permutation(NUM_BLOCKS).astype(np.int32)
        for slot in range(DECODES + 1):  # scattered blocks, 512 a slot
            table[slot, :512] = blocks[slot * 512 : (slot + 1) * 512]
        self.runner = self.new_runner()

    def new_runner(self, pod_rule: PodRule | None = None) -> GpuRunner:
        return GpuRunner(self.spec, self._weights, self.pool, self.scratch, pod_rule)

    def steps(self, make: MakeBatch, count: int, place: Place) -> tuple[float, float]:
        """Milliseconds a step: wall clock, and the median on the device."""
        pending: list[Enqueued] = []
        device = []
        start = time.perf_counter()
        for i in range(count):
            pending.append(self.runner.enqueue(make(i), place))
            if len(pending) == 2:
                device.append(pending.pop(0).collect().seconds)
        device += [enqueued.collect().seconds for enqueued in pending]
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
            self.steps(self.decode(context), 3, self.whole)
            wall, device = self.steps(self.decode(context), 30, self.whole)
            print(f"decode {DECODES} rows, context {context}: {wall:.2f} ms a step (device {device:.2f})", flush=True)

    def table_prefill(self) -> None:
        for tokens in (128, 256, 512, 1024, 2048):
            count = max(PROMPT // tokens, 8)
            self.steps(self.prefill(tokens), count, self.whole)
            wall, _ = self.steps(self.prefill(tokens), 2 * count, self.whole)
            print(f"prefill of {PROMPT} in slices of {tokens}: {tokens / wall * 1e3:,.0f} tokens/s", flush=True)

    def table_hybrid(self) -> None:
        for tokens in (128, 256, 512, 1024):
            self.steps(self.hybrid(tokens, 1024), 4, self.whole)
            wall, _ = self.steps(self.hybrid(tokens, 1024), 24, self.whole)
            rate = tokens / wall * 1e3
            what = f"hybrid, {DECODES} decodes and {tokens} prompt tokens"
            print(f"{what}: {wall:.2f} ms, {rate:,.0f} prompt tokens/s", flush=True)

    def table_sides(self) -> None:
        """Disjoint parts, and decode on the whole device with prefill capped."""
        other = self.beside_runner()
        for context in (1024, 4096):
            for form in ("disjoint", "capped"):
                for sms in PREFILL_SMS:
                    print(line(self.beside(other, form, sms, context, 50)), flush=True)

    def table_frontier(self) -> tuple[list[Limits], list[Point]]:
        limits, points = [], []
        other = self.beside_runner()
        print("context way       setting        decode step     prefill")
        for context in CONTEXTS:
            self.steps(self.decode(context), 3, self.whole)
            decode, _ = self.steps(self.decode(context), 20, self.whole)
            self.steps(self.prefill(1024), 2, self.whole)
            prefill, _ = self.steps(self.prefill(1024), 8, self.whole)
            limits.append(Limits(context, decode, 1024 / prefill * 1e3))
            print(
                f"{context:>7} each alone               {decode:7.2f} ms {1024 / prefill * 1e3:9,.0f} t/s", flush=True
            )
            for tokens in (step - DECODES for step in TOKEN_STEPS if step > DECODES):
                self.steps(self.hybrid(tokens, context), 2, self.whole)
                wall, _ = self.steps(self.hybrid(tokens, context), 10, self.whole)
                points.append(Point(context, "hybrid", tokens, self.whole.sms, wall, tokens / wall * 1e3))
                print(line(points[-1]), flush=True)
            for form in FORMS:
                for sms in PREFILL_SMS if FORMS[form].divided else (self.whole.sms,):
                    points.append(self.beside(other, form, sms, context, 30))
                    print(line(points[-1]), flush=True)
        if (processes := self.processes()) is not None:  # last, so that this process leaves the device to them
            for context in CONTEXTS:
                for sms in PREFILL_SMS:
                    points.append(processes.beside(sms, context, 30))
                    print(line(points[-1]), flush=True)
            processes.close()
        return limits, points

    def table_rotation(self) -> None:
        """What decode and prefill notice of a change of shares where lanes are processes."""
        if (processes := self.processes()) is not None:
            processes.rotate(1024)
            processes.close()

    def processes(self) -> MpsSides | None:
        if WHY_NO_MPS is not None:
            print(f"without lanes as processes: {WHY_NO_MPS}", flush=True)
            return None
        return MpsSides(self, DECODES, PREFILL_SMS)

    def beside_runner(self) -> GpuRunner:
        """Of a second lane, to run in a thread."""
        sys.setswitchinterval(2e-4)
        return self.new_runner()

    def beside(self, other: GpuRunner, form: str, sms: int, context: int, count: int) -> Point:
        """Decode steps while prefill slices of some 20 ms run without a pause."""
        share = min(sms / self.parts.total, 0.99)
        theirs, ours = self.places[form].of("P", share), self.places[form].of("D", 1.0 - share)
        tokens = 1024 if theirs.sms > 60 else 512
        other.prepare(StepShape(tokens, 0), theirs)
        self.runner.prepare(StepShape(0, DECODES), ours)
        decode = self.decode(context)
        stop, done = threading.Event(), [0]

        def prefill() -> None:
            make, pending, i = self.prefill(tokens), list[Enqueued](), 0
            while not stop.is_set():
                pending.append(other.enqueue(make(i), theirs))
                i += 1
                if len(pending) == 2:
                    pending.pop(0).collect()
                    done[0] += tokens
            for enqueued in pending:
                enqueued.collect()

        thread = threading.Thread(target=prefill)
        thread.start()
        time.sleep(0.1)
        self.steps(decode, 4, ours)
        before, start = done[0], time.perf_counter()
        wall, _ = self.steps(decode, count, ours)
        rate = (done[0] - before) / (time.perf_counter() - start)
        stop.set()
        thread.join()
        return Point(context, form, theirs.sms, ours.sms, wall, rate)


def main() -> None:
    tables = ("decode", "prefill", "hybrid", "sides", "frontier", "rotation")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--shape", choices=SHAPES, default="llama-3-8b", help="(default: %(default)s)")
    shape.add_argument("--config", help="a model's config.json")
    parser.add_argument("--quantization", choices=("fp8",), help="of weights (default: none)")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "fp8"), help="(default: bfloat16)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the frontier's points")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture of the frontier (needs matplotlib)")
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"{', '.join(tables)} (default: all)")
    arguments = parser.parse_args()
    unknown = set(arguments.tables) - set(tables)
    if unknown:
        parser.error(f"there is no table {', '.join(sorted(unknown))}; choose from {', '.join(tables)}")
    with tempfile.TemporaryDirectory() as folder:
        config = arguments.config
        if config is None:
            config = str(Path(folder) / "config.json")
            Path(config).write_text(json.dumps(SHAPES[arguments.shape]))
        kv_dtype = "bfloat16" if arguments.kv_cache_dtype == "auto" else "float8_e4m3fn"
        bench = Bench(config, arguments.quantization, kv_dtype)
    for table in arguments.tables or tables:
        found = getattr(bench, f"table_{table}")()
        if table == "frontier":
            model = arguments.config or f"the shape of {arguments.shape}"
            about = {
                "device": torch.cuda.get_device_name(),
                "model": model,
                "rows": DECODES,
                "torch": torch.__version__,
                "quantization": arguments.quantization,
                "kv_dtype": kv_dtype,
            }
            if arguments.json:
                save(arguments.json, about, *found)
            if arguments.plot:
                plot(arguments.plot, f"{model}, {DECODES} decode rows, {about['device']}", *found)


if __name__ == "__main__":
    main()
