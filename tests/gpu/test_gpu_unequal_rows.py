"""Decode rows of very different lengths on a GPU: what torch computes, from one graph that is replayed with other rows,
more than run at a time and divided among thread blocks or not."""

import itertools

import numpy as np
import pytest
import torch

from tidegate.base.specs import ModelSpec

HEADS, KV_HEADS, DIM, SIZE = 32, 8, 128, 16
NUM_BLOCKS, LONGEST = 9000, 6000
ROWS = 80  # of the graph


@pytest.fixture(scope="module")
def step():
    """Runs attention of rows of these lengths by a graph; the result and what torch computes."""
    from tidegate.kernels.flashinfer_attention import DecodeRows, LayerCache, PagedRows, Workspace, scratch_bytes
    from tidegate.kernels.step_rows import Types

    torch.manual_seed(0)
    spec = ModelSpec("LlamaForCausalLM", 1, HEADS * DIM, HEADS, KV_HEADS, DIM, 1024, 1000, 8192)
    types = Types(torch.bfloat16, torch.bfloat16)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    scratch = torch.empty(scratch_bytes(spec, types, 64, 1, sms, ROWS), dtype=torch.uint8, device="cuda")
    cache = LayerCache(*torch.randn(2, NUM_BLOCKS, SIZE, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda"))
    paged = PagedRows(*(torch.zeros(count, dtype=torch.int32, device="cuda") for count in (ROWS + 1, NUM_BLOCKS, ROWS)))
    paged.last_block_len.fill_(1)
    rows = DecodeRows(spec, types, SIZE, Workspace(scratch), paged)
    q = torch.randn(ROWS, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(q)
    shuffled = torch.from_numpy(np.random.default_rng(0).permutation(NUM_BLOCKS).astype(np.int32))
    graph = torch.cuda.CUDAGraph()

    def run(lens):
        lens = np.array([*lens, *[1] * (ROWS - len(lens))], dtype=np.int32)
        blocks = -(-lens // SIZE)
        indptr = torch.from_numpy(np.concatenate([[0], np.cumsum(blocks)]).astype(np.int32))
        paged.indptr.copy_(indptr)
        paged.indices[: indptr[-1]].copy_(shuffled[: indptr[-1]])
        paged.last_block_len.copy_(torch.from_numpy(lens - (blocks - 1) * SIZE))
        rows.plan(indptr, torch.from_numpy(lens))
        out.fill_(float("nan"))
        graph.replay()
        wanted = []
        for row, (start, end) in enumerate(itertools.pairwise(indptr.tolist())):
            own = shuffled[start:end].long().cuda()
            keys, values = (side[own].flatten(0, 1)[: lens[row]].transpose(0, 1).float() for side in cache[:2])
            wanted.append(
                torch.nn.functional.scaled_dot_product_attention(
                    q[row].view(KV_HEADS, -1, DIM).float(), keys, values
                ).flatten(0, 1)
            )
        return out.float(), torch.stack(wanted), rows._blocks_apiece(blocks)

    indptr = torch.arange(ROWS + 1, dtype=torch.int32)
    rows.plan(indptr, torch.ones(ROWS, dtype=torch.int32))
    rows.run(q, cache, out)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        rows.run(q, cache, out)
    return run


def uneven(count, seed):
    return np.minimum(LONGEST, np.random.default_rng(seed).lognormal(6.6, 0.95, count).astype(int) + 1)


@pytest.mark.parametrize(
    ("lens", "divided"),
    [
        (uneven(80, 0), True),
        ([1000] * 80, False),
        (uneven(66, 1), True),
        ([17] * 79 + [LONGEST], True),
        ([1], False),
        (uneven(80, 2), True),
    ],
)
def test_rows_are_what_torch_computes(step, lens, divided):
    got, wanted, apiece = step(lens)
    assert (apiece > 0) == divided
    assert float((got - wanted).abs().max() / wanted.std()) < 0.05, "but for rounding"
