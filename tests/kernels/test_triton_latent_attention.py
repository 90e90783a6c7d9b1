"""The GPU's latent attention computes what plain torch does. Without a GPU, set TRITON_INTERPRET=1."""

import importlib.util
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tidegate.base.specs import LatentSpec, ModelSpec
from tidegate.kernels.attention import AttentionRows
from tidegate.kernels.torch_latent_attention import TorchLatentAttention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE, TOLERANCE = (torch.bfloat16, 1e-2) if DEVICE == "cuda" else (torch.float32, 1e-5)  # of the largest result
CAN_RUN = importlib.util.find_spec("triton") and (DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")
pytestmark = pytest.mark.skipif(not CAN_RUN, reason="needs Triton, and a GPU or TRITON_INTERPRET=1")
BLOCK_SIZE, BLOCKS, MAX_SLICES = 16, 60, 16


def model(heads, rank, rope):
    latent = LatentSpec(rank, 32, rope, 32, None, 0.1, True)
    return ModelSpec("DeepseekV3ForCausalLM", 1, 64, heads, 1, rank + rope, 64, 50, 512, latent=latent)


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class Step:
    """Slices ``(context, count)``, then decode rows with so much context, over a cache that holds all contexts; and as
    much padding. ``wanted``: plain torch's results in float32, of all rows that are not padding."""

    def __init__(self, spec, slices, contexts, padding=0, dtype=DTYPE):
        from tidegate.kernels.step_rows import ApartRows, Types
        from tidegate.kernels.triton_latent_attention import DecodeRows, GraphAttention, PrefillRows

        torch.manual_seed(0)
        starts, counts = [s for s, _ in slices] + contexts, [c for _, c in slices] + [1] * len(contexts)
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        table = np.random.default_rng(0).permutation(len(ends) * BLOCKS).reshape(-1, BLOCKS).astype(np.int32)
        scratch_block = table.size
        kv = torch.randn(1, 1, scratch_block + 1, BLOCK_SIZE, 1, spec.head_dim).to(DEVICE, dtype)
        kv[:, :, scratch_block] = torch.nan  # what padding reads concerns padding only
        lists = [row[: -(-end // BLOCK_SIZE)] for row, end in zip(table, ends, strict=True)]
        prompt = sum(counts[: len(slices)])
        self._split = prompt + padding if slices else 0
        self._rows = [*range(prompt), *range(self._split, self._split + len(contexts))]
        decodes = len(contexts) + padding if contexts else 0
        places = np.full(self._split + decodes, scratch_block * BLOCK_SIZE, dtype=np.int32)
        written = [
            blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
            for blocks, start, end in zip(lists, starts, ends, strict=True)
            for p in range(start, end)
        ]
        places[self._rows] = written
        self.q = torch.randn(len(places), spec.num_heads, spec.head_dim).to(DEVICE, dtype)
        self.k = torch.randn(len(places), 1, spec.head_dim).to(DEVICE, dtype)
        self.v = self.k[..., : spec.latent.rank]
        plain = TorchLatentAttention(spec, kv.float(), torch.from_numpy(table))
        plain.plan(AttentionRows(list(range(len(ends))), starts, counts))
        self.wanted = plain.run(0, self.q[self._rows].float(), self.k[self._rows].float(), self.v[self._rows].float())

        workspace = SimpleNamespace(scratch=torch.full((64 << 20,), 255, dtype=torch.uint8, device=DEVICE))  # NaNs
        self.prefill, self.decode, types = None, None, Types(dtype, dtype)
        if slices:
            begun = np.cumsum([0, *counts[: len(slices)]]).tolist()
            qo_indptr = ints(begun + begun[-1:] * (MAX_SLICES - len(slices)))
            rows = self._paged(lists[: len(slices)], ends, MAX_SLICES - len(slices), [])
            self.prefill = PrefillRows(spec, types, BLOCK_SIZE, self._split, workspace, qo_indptr, rows)
        if contexts:
            rows = self._paged(lists[len(slices) :], ends[len(slices) :], padding, [scratch_block])
            self.decode = DecodeRows(spec, types, BLOCK_SIZE, workspace, rows)
        self.attention = GraphAttention(kv, ints(places), ApartRows(self._split, self.prefill, self.decode))

    def _paged(self, lists, ends, padding, blocks_of_padding):
        lists = [*lists, *[np.array(blocks_of_padding, dtype=np.int32)] * padding]
        last = [(end - 1) % BLOCK_SIZE + 1 for end in ends[: len(lists) - padding]] + [1] * padding
        indptr = np.cumsum([0] + [len(blocks) for blocks in lists]).astype(np.int32)
        return SimpleNamespace(indptr=ints(indptr), indices=ints(np.concatenate(lists)), last_block_len=ints(last))

    def run(self):
        return self.attention.run(0, self.q, self.k, self.v)[self._rows]


def check(step, tolerance=TOLERANCE):
    worst = (step.run().float() - step.wanted).abs().max()
    assert worst < tolerance * step.wanted.abs().max()


@pytest.mark.parametrize(
    ("heads", "rank", "rope"),
    [
        (16, 64, 16),  # DeepSeek-V2-Lite's heads: a tile of decode is filled
        (6, 32, 16),  # fewer heads than rows in a tile
        (40, 32, 32),  # more than its short one
        (100, 16, 16),  # a token's heads take two tiles
    ],
)
def test_decode_rows(heads, rank, rope):
    check(Step(model(heads, rank, rope), [], [0, 31, 32, 300]))


@pytest.mark.parametrize("heads", [16, 5])
def test_slices_see_what_is_before_them_and_no_more(heads):
    check(Step(model(heads, 32, 16), [(0, 11), (70, 1), (290, 7), (0, 1)], []))


def test_a_slice_of_so_many_tokens_that_keys_are_not_divided():
    step = Step(model(64, 16, 16), [(3, 130), (0, 7)], [])
    assert step.prefill._parts == 1
    check(step)


def test_hybrid_steps_with_padding():
    check(Step(model(16, 32, 16), [(40, 9), (100, 3)], [17, 0, 280], padding=3))


def test_a_decode_row_has_the_same_bits_whoever_is_beside_it():
    spec = model(16, 32, 16)
    alone, crowd = Step(spec, [], [280, 3], padding=2), Step(spec, [], [280, 3, 150, 90])
    for name in ("q", "k"):
        getattr(crowd, name)[:2] = getattr(alone, name)[:2]
    kv, theirs = alone.attention._caches[0], crowd.attention._caches[0]
    ours = [step.decode._rows for step in (alone, crowd)]
    used = [int(rows.indptr[2]) for rows in ours]
    theirs[ours[1].indices[: used[1]].long()] = kv[ours[0].indices[: used[0]].long()]
    assert torch.equal(alone.run()[:2], crowd.run()[:2])


def test_sixteen_bits_are_near_the_exact_result():
    check(Step(model(16, 32, 16), [(30, 5)], [100, 20], dtype=torch.float16), 5e-3)


def test_vectors_go_to_their_places():
    from tidegate.kernels.triton_write_kv import write_vectors

    cache, vectors = torch.zeros(3, 4, 1, 24, device=DEVICE), torch.randn(5, 1, 30, device=DEVICE)[..., :24]
    places = ints([11, 0, 5, 6, 2])
    write_vectors(vectors, cache, places)
    wanted = torch.zeros(12, 1, 24, device=DEVICE)
    wanted[places.long()] = vectors
    assert torch.equal(cache.view(12, 1, 24), wanted)


@pytest.mark.skipif(DEVICE != "cuda", reason="heads of this size take long to interpret")
def test_the_sizes_of_deepseek_v2_lite():
    check(Step(model(16, 512, 64), [(0, 200), (700, 150)], [900, 0, 63, 500], padding=3))
