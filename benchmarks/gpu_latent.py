"""Latent attention on one GPU, without a model: a layer of DeepSeek-V2-Lite's shape, in each tile that it could take.

    python benchmarks/gpu_latent.py [--flashinfer]

The cache is flushed before every run. With --flashinfer, FlashInfer's kernel too, which takes the whole device, planned
as it plans itself (compiled first where that was not done ahead: a minute).
"""

import argparse
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch
from kernel_time import us
from model_shapes import DEEPSEEK_V2_LITE

from tidegate.kernels import triton_latent_attention as latent
from tidegate.kernels.triton_latent_attention import LatentRows, Tile
from tidegate.models.config import spec_from_hf

SPEC = spec_from_hf(DEEPSEEK_V2_LITE)
RANK, WIDTH = 512, 576
BLOCK_SIZE, NUM_BLOCKS, DECODES, CONTEXT = 16, 34000, 64, 4096
DECODE_TILES = (latent.DECODE, Tile(16, 32, 4, 4), Tile(16, 64, 4, 3), Tile(16, 64, 8, 3), Tile(16, 64, 8, 5))
PREFILL_TILES = (
    latent.PREFILL, Tile(32, 32, 4, 4), Tile(32, 32, 8, 5), Tile(64, 32, 8, 4), Tile(64, 64, 8, 2), Tile(16, 32, 4, 5),
)  # fmt: skip


class Rows:
    """Rows of ``counts`` tokens that end at ``lengths``, in scattered blocks of a random cache."""

    def __init__(self, cache: torch.Tensor, counts: list[int], lengths: list[int]) -> None:
        used = [-(-length // BLOCK_SIZE) for length in lengths]
        self.cache, self.tokens = cache, sum(counts)
        self.qo_indptr, indptr = (_ints(np.cumsum([0, *sizes])) for sizes in (counts, used))
        blocks = _ints(np.random.default_rng(0).permutation(NUM_BLOCKS)[: sum(used)])
        self.lengths, last = _ints(lengths), _ints([(length - 1) % BLOCK_SIZE + 1 for length in lengths])
        self.paged = SimpleNamespace(indptr=indptr, indices=blocks, last_block_len=last)
        self.q = torch.randn(self.tokens, SPEC.num_heads, WIDTH, device="cuda").bfloat16()
        pairs = sum(n * length - n * (n - 1) // 2 for n, length in zip(counts, lengths, strict=True))
        self.flops = 2 * SPEC.num_heads * (RANK + WIDTH) * pairs
        self.bytes = 2 * WIDTH * sum(lengths)

    def ours(self, tile: Tile, programs: int, scratch: torch.Tensor) -> Callable[[], None]:
        qo_indptr = self.qo_indptr if self.tokens > len(self.lengths) else None
        rows = LatentRows(SPEC, BLOCK_SIZE, self.tokens, self.paged, scratch, tile, programs, qo_indptr)  # type: ignore[arg-type]
        out = torch.empty(self.tokens, SPEC.num_heads, RANK, dtype=torch.bfloat16, device="cuda")
        return lambda: rows.run(self.q, self.cache, out)

    def flashinfer(self, scratch: torch.Tensor) -> Callable[[], None]:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        wrapper = BatchMLAPagedAttentionWrapper(scratch, backend="fa3")
        wrapper.plan(
            self.qo_indptr, self.paged.indptr, self.paged.indices, self.lengths, SPEC.num_heads, RANK, WIDTH - RANK,
            BLOCK_SIZE, True, WIDTH**-0.5, torch.bfloat16, torch.bfloat16,
        )  # fmt: skip
        keys = self.cache.squeeze(2)
        queries, cache = self.q.split((RANK, WIDTH - RANK), dim=-1), keys.split((RANK, WIDTH - RANK), dim=-1)
        return lambda: wrapper.run(*queries, *cache)


def _ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flashinfer", action="store_true", help="measure FlashInfer's kernel beside ours")
    arguments = parser.parse_args()
    evicted = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")  # more than the cache holds
    scratch = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    cache = torch.randn(NUM_BLOCKS, BLOCK_SIZE, 1, WIDTH, device="cuda").bfloat16()
    decodes = {f"decode, {DECODES} rows, context {n}": ([1] * DECODES, [n] * DECODES) for n in (1024, 4096, 7900)}
    prefills = {f"prefill, {n} tokens, context {CONTEXT}": ([n], [CONTEXT]) for n in (128, 512, 1024, 2048)}
    for name, (counts, lengths) in (decodes | prefills).items():
        rows = Rows(cache, counts, lengths)
        decode = name in decodes
        usual = latent.DECODE_PROGRAMS if decode else latent.PREFILL_PROGRAMS
        found = {
            f"{tuple(tile)}, {programs} programs": us(rows.ours(tile, programs, scratch), evicted)
            for tile in (DECODE_TILES if decode else PREFILL_TILES)
            for programs in (usual, 2 * usual)
        }
        if arguments.flashinfer:
            found["FlashInfer"] = us(rows.flashinfer(scratch), evicted)
        print(name, flush=True)
        for what, time_us in sorted(found.items(), key=lambda item: item[1]):
            rates = f"{rows.bytes / time_us / 1e6:5.2f} TB/s {rows.flops / time_us / 1e6:6.0f} TFLOP/s"
            print(f"  {what:36} {time_us:8.1f} us {rates}", flush=True)


if __name__ == "__main__":
    main()
