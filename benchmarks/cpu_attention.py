"""Attention on the CPU alone: the compiled kernel beside torch's, over blocks that lie scattered.

    python benchmarks/cpu_attention.py [--threads 2]

Microseconds of one layer, the median of 30 runs, with SmolLM2-135M's heads and with Llama-3-8B's; "GFLOP/s" counts what
causal attention needs.
"""

import argparse
import time

import torch

from tidegate.base.specs import ModelSpec
from tidegate.kernels.attention import Attention, AttentionRows
from tidegate.kernels.cpu_attention import CpuAttention
from tidegate.kernels.torch_attention import TorchAttention

SHAPES = {"SmolLM2-135M": (9, 3, 64), "Llama-3-8B": (32, 8, 128)}  # query heads, KV heads, elements of a head
# Positions before each row, and tokens of each.
ROWS = {
    "prompt of 256": ([0], [256]),
    "prompt of 1,024": ([0], [1024]),
    "slice of 256 after 1,000": ([1000], [256]),
    "slice of 5 after 300": ([300], [5]),
    "decode at 500": ([500], [1]),
    "decode at 1,900": ([1900], [1]),
    "8 decodes at 500": ([500] * 8, [1] * 8),
    "16 decodes at 1,900": ([1900] * 16, [1] * 16),
}
BLOCK_SIZE, MAX_LEN, SLOTS, LAYERS = 16, 2048, 16, 4


def median_us(attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    times = []
    for i in range(32):
        start = time.perf_counter()
        attention.run(i % LAYERS, q, k, v)
        times.append(time.perf_counter() - start)
    return 1e6 * sorted(times[2:])[15]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    torch.set_num_threads(parser.parse_args().threads)
    blocks = SLOTS * MAX_LEN // BLOCK_SIZE
    print("| | torch | compiled | | GFLOP/s |\n|---|---|---|---|---|")
    for name, (heads, kv_heads, head_dim) in SHAPES.items():
        spec = ModelSpec("LlamaForCausalLM", LAYERS, 64, heads, kv_heads, head_dim, 64, 50, MAX_LEN)
        kv = torch.randn(LAYERS, 2, blocks, BLOCK_SIZE, kv_heads, head_dim)
        table = torch.randperm(blocks, dtype=torch.int32).view(SLOTS, -1)
        backends: list[Attention] = [TorchAttention(spec, kv, table), CpuAttention(spec, kv, table)]
        for what, (starts, counts) in ROWS.items():
            q, k, v = (torch.randn(sum(counts), n, head_dim) for n in (heads, kv_heads, kv_heads))
            times = []
            for backend in backends:
                backend.plan(AttentionRows(list(range(len(counts))), starts, counts))
                times.append(median_us(backend, q, k, v))
            pairs = sum(count * (start + count / 2) for start, count in zip(starts, counts, strict=True))
            gflops = 4 * heads * head_dim * pairs / times[1] / 1e3
            print(f"| {name}, {what} | {times[0]:,.0f} | {times[1]:,.0f} | {times[0] / times[1]:.1f} | {gflops:.0f} |")


if __name__ == "__main__":
    main()
