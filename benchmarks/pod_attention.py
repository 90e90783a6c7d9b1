"""Attention of hybrid batches on one GPU, prompts and decodes in one kernel (POD) and in two; then whole steps of both.

    python benchmarks/pod_attention.py [attention] [steps] [--json FILE]

``attention``: of one layer of the Llama-3-8B shape in bf16, in a CUDA graph, each layer with KV of its own. ``steps``:
64 decodes and a chunk, the whole model with random weights, also with what `--mode pod` would choose. What it comes to
in serving, on one server started with `--mode pod`:

    tidegate bench goodput --workload conv --ttft 500ms --tpot 25ms --sweep mode=chunked,pod
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from gpu_steps import Bench, MakeBatch
from model_shapes import LLAMA_3_8B

from tidegate.base.batch import Batch
from tidegate.device.green_contexts import SmParts
from tidegate.device.places import FORMS, Places
from tidegate.kernels.gpu_support import why_no_graphs, why_no_pod
from tidegate.kernels.pod_rule import AXES, Axes, HybridWork, PodRule
from tidegate.kernels.step_rows import Types
from tidegate.models.sources import open_model
from tidegate.runner.pod_trial import LAYERS, Trial, measure

SHOWN = Axes((128, 256, 512, 1024), (0, 4096), (16, 64, 128), (1024, 4096, 8192))
BLOCK_SIZE = 16
STEPS = 12


def attention(config: str) -> Trial:
    """Prints microseconds for one layer, in two kernels and in one, and how many times as fast that is."""
    spec = open_model(config, "dummy").spec
    blocks = max(SHOWN.rows) * max(SHOWN.context) // BLOCK_SIZE
    shape = (LAYERS, 2, blocks, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
    kv = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    trial = measure(spec, kv, Places(SmParts(), FORMS["streams"]).of("D", 1.0), SHOWN)
    chunks = SHOWN.prompt_tokens
    print("decodes context start | two kernels, one (µs) and gain, for chunks of " + ", ".join(map(str, chunks)))
    for rows in SHOWN.rows:
        for context in SHOWN.context:
            for start in SHOWN.start:
                cells = []
                for chunk in chunks:
                    apart, pod = trial.seconds[HybridWork(chunk, start, rows, context)]
                    cells.append(f"{apart * 1e6:6.0f} {pod * 1e6:6.0f} {apart / pod:5.2f}")
                print(f"{rows:7} {context:7} {start:5} | " + " | ".join(cells), flush=True)
    print(f"{PodRule(trial.seconds, SHOWN)}; results differ by {trial.difference:.4f}", flush=True)
    return trial


def steps(config: str) -> None:
    """Prints milliseconds of whole steps in both forms, and which of them the measured rule takes."""
    bench = Bench(config)
    spec = open_model(config, "dummy").spec
    rule = PodRule(measure(spec, bench.pool.kv, bench.whole).seconds)
    bench.pool.kv.normal_()
    print(f"as `--mode pod` measures it: {rule}")
    bench.runner = bench.new_runner(PodRule(dict.fromkeys(AXES.points(), (2.0, 1.0))))  # fuses whatever may be fused
    print("context chunk | step in two kernels | in one | taken")
    for context in (1024, 4096, 7900):
        for chunk in (192, 448, 960):
            found = []
            for fused in (False, True):
                make = _of_form(bench.hybrid(chunk, context), fused)
                bench.steps(make, 3, bench.whole)
                found.append(bench.steps(make, STEPS, bench.whole)[0])
            taken = rule.wins(HybridWork.of(bench.hybrid(chunk, context)(STEPS // 2)))
            print(
                f"{context:7} {chunk:5} | {found[0]:7.2f} ms | {found[1]:7.2f} ms | {'one' if taken else 'two'}",
                flush=True,
            )


def _of_form(make: MakeBatch, fused: bool) -> MakeBatch:
    def batch(i: int) -> Batch:
        made = make(i)
        made.fused = fused
        return made

    return batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="the times of attention, in seconds a layer")
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="attention, steps (default: both)")
    arguments = parser.parse_args()
    tables = arguments.tables or ["attention", "steps"]
    if unknown := set(tables) - {"attention", "steps"}:
        parser.error(f"there is no table {', '.join(sorted(unknown))}; choose attention or steps")
    with tempfile.TemporaryDirectory() as folder:
        config = str(Path(folder) / "config.json")
        Path(config).write_text(json.dumps(LLAMA_3_8B))
        spec, device = open_model(config, "dummy").spec, torch.device("cuda", 0)
        types = Types(torch.bfloat16, torch.bfloat16)
        reason = why_no_graphs(spec, types, device) or why_no_pod(spec, types)
        if reason is not None:
            parser.exit(1, f"there is nothing to measure: {reason}\n")
        if "attention" in tables:
            trial = attention(config)
            torch.cuda.empty_cache()
            if arguments.json:
                rows = [[*work, apart, pod] for work, (apart, pod) in trial.seconds.items()]
                arguments.json.write_text(json.dumps({"columns": [*HybridWork._fields, "apart", "pod"], "rows": rows}))
        if "steps" in tables:
            steps(config)


if __name__ == "__main__":
    main()
