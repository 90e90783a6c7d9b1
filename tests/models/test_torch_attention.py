"""Paged attention against a few lines of plain arithmetic: any mix of rows, any placement of blocks, any window."""

import random
from collections.abc import Iterator

import msgspec
import pytest
import torch

from tidegate.base.specs import ModelSpec
from tidegate.kernels.attention import AttentionRows
from tidegate.kernels.cpu_attention import CpuAttention
from tidegate.kernels.torch_attention import TorchAttention
from tidegate.kernels.windows import Backend

BLOCK_SIZE = 4
MAX_BLOCKS = 90
BACKENDS: list[Backend] = [TorchAttention, CpuAttention]
SPEC = ModelSpec("LlamaForCausalLM", 2, 64, 6, 2, 16, 64, 50, 512)


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, window: int | None) -> torch.Tensor:
    """``[n, Hq, D]`` of queries at positions ``start`` and on over all keys ``[start + n, Hkv, D]``."""
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) / q.shape[-1] ** 0.5
    query, key = torch.arange(start, start + len(q))[:, None], torch.arange(len(k))
    visible = key <= query
    if window is not None:
        visible &= key > query - window
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))


class Pages:
    """A KV array full of NaN, a block table, and what has been written so far, kept per slot in order."""

    def __init__(
        self,
        backend: Backend,
        slots: int,
        rng: random.Random,
        window: int | None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        blocks = slots * MAX_BLOCKS
        self.kv = torch.full((2, 2, blocks, BLOCK_SIZE, 2, 16), torch.nan, dtype=dtype)
        table = torch.arange(blocks, dtype=torch.int32).view(slots, MAX_BLOCKS)
        for row in table[1::2]:  # every second slot's blocks are cut into runs, in another order
            runs = list(row.split(rng.choice([1, 7, 30])))
            rng.shuffle(runs)
            row.copy_(torch.cat(runs))
        self.table = table
        self.window = window
        self.attention = backend(msgspec.structs.replace(SPEC, sliding_window=window), self.kv, table)
        self.keys = [torch.empty(0, 2, 16) for _ in range(slots)]
        self.values = [torch.empty(0, 2, 16) for _ in range(slots)]

    def step(self, slots: list[int], counts: list[int], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One step of random rows: what the backend gives, and what is right."""
        total = sum(counts)
        q, k, v = torch.randn(total, 6, 16), torch.randn(total, 2, 16), torch.randn(total, 2, 16)
        starts = [len(self.keys[slot]) for slot in slots]
        self.attention.plan(AttentionRows(slots, starts, counts))
        got = self.attention.run(layer, q, k, v)
        expected = []
        for slot, start, q_row, k_row, v_row in zip(
            slots, starts, q.split(counts), k.split(counts), v.split(counts), strict=True
        ):
            self.keys[slot] = torch.cat((self.keys[slot], k_row))
            self.values[slot] = torch.cat((self.values[slot], v_row))
            expected.append(plain_attention(q_row, self.keys[slot], self.values[slot], start, self.window))
        return got, torch.cat(expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 1, 6, 150])
@pytest.mark.parametrize("seed", range(6))
def test_random_steps_attend_as_arithmetic_says(seed: int, window: int | None, backend: Backend) -> None:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    pages = Pages(backend, 5, rng, window)
    for _ in range(8):
        slots = rng.sample(range(5), rng.randint(1, 5))
        room = [MAX_BLOCKS * BLOCK_SIZE - len(pages.keys[slot]) for slot in slots]
        counts = [min(rng.choice([1, 1, 2, 5, 40]), left) for left in room]
        got, expected = pages.step(slots, counts, layer=1)
        torch.testing.assert_close(got, expected, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("count", [128, 129, 200, 257])
def test_rows_longer_than_one_kernel_call(count: int, window: int | None, backend: Backend) -> None:
    torch.manual_seed(count)
    pages = Pages(backend, 2, random.Random(count), window)
    for slots, counts in (([0, 1], [count, count]), ([1, 0], [60, 1])):
        got, expected = pages.step(slots, counts, layer=0)
        torch.testing.assert_close(got, expected, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_rows_own_places_of_the_layer_are_written(backend: Backend) -> None:
    pages = Pages(backend, 2, random.Random(0), None)
    pages.step([1], [9], layer=1)
    written = ~pages.kv.isnan()
    if backend is CpuAttention:  # whose blocks hold keys as [Hkv, D, block_size] and values as [Hkv, block_size, D]
        keys, values = written.flatten(3).unbind(1)
        keys = keys.unflatten(2, (2, 16, BLOCK_SIZE)).permute(0, 1, 4, 2, 3)
        values = values.unflatten(2, (2, BLOCK_SIZE, 16)).transpose(2, 3)
        written = torch.stack((keys, values), 1)
    expected = torch.zeros_like(written)  # [layer, k or v, block, offset, head, element]
    for position in range(9):
        expected[1, :, int(pages.table[1, position // BLOCK_SIZE]), position % BLOCK_SIZE] = True
    assert torch.equal(written, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_block_table_is_read_at_plan_time_only(backend: Backend) -> None:
    pages = Pages(backend, 1, random.Random(0), None)
    pages.step([0], [6], layer=0)
    q, k, v = torch.randn(1, 6, 16), torch.randn(1, 2, 16), torch.randn(1, 2, 16)
    pages.attention.plan(AttentionRows([0], [6], [1]))
    pages.table.fill_(MAX_BLOCKS - 1)
    keys, values = torch.cat((pages.keys[0], k)), torch.cat((pages.values[0], v))
    expected = plain_attention(q, keys, values, 6, None)
    torch.testing.assert_close(pages.attention.run(0, q, k, v), expected, rtol=0.0, atol=1e-5)


def test_a_narrower_kv_type_rounds_and_nothing_else() -> None:
    torch.manual_seed(1)
    pages = Pages(TorchAttention, 2, random.Random(1), None, torch.bfloat16)
    for slots, counts in (([0, 1], [30, 30]), ([0, 1], [1, 4])):
        got, expected = pages.step(slots, counts, layer=0)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected, rtol=0.0, atol=0.05)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_a_decode_row_is_the_same_to_the_bit_in_any_batch_and_on_any_number_of_threads() -> None:
    torch.manual_seed(0)
    pages = Pages(CpuAttention, 4, random.Random(0), None)
    pages.step([0, 1, 2, 3], [200, 3, 90, 330], layer=0)
    q, k, v = torch.randn(4, 6, 16), torch.randn(4, 2, 16), torch.randn(4, 2, 16)
    starts = [200, 3, 90, 330]
    results = []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        pages.attention.plan(AttentionRows([0, 1, 2, 3], starts, [1] * 4))
        results.append(pages.attention.run(0, q, k, v))
        alone = []
        for i in range(4):
            pages.attention.plan(AttentionRows([i], starts[i : i + 1], [1]))
            alone.append(pages.attention.run(0, q[i : i + 1], k[i : i + 1], v[i : i + 1]))
        results.append(torch.cat(alone))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("window", [None, 1, 50, 130])
def test_a_query_gets_the_same_to_the_bit_in_any_slice_and_as_a_decode(window: int | None) -> None:
    torch.manual_seed(0)
    total = 301
    q, k, v = torch.randn(total, 6, 16), torch.randn(total, 2, 16), torch.randn(total, 2, 16)
    results = []
    for size, threads in ((total, 1), (total, 2), (1, 1), (7, 2), (128, 3)):
        torch.set_num_threads(threads)
        pages = Pages(CpuAttention, 4, random.Random(size), window)
        parts = []
        for start in range(0, total, size):
            new = min(size, total - start)
            # Its neighbours differ from slice to slice: a row before it and one after.
            counts = [1 + start % 3, new, 1 + start % 40]
            rows = [torch.cat((torch.randn(counts[0], *x.shape[1:]), x[start : start + new],
                               torch.randn(counts[2], *x.shape[1:]))) for x in (q, k, v)]  # fmt: skip
            pages.attention.plan(AttentionRows([0, 1, 2], [0, start, 0], counts))
            parts.append(pages.attention.run(1, *rows)[counts[0] : counts[0] + new])
        results.append(torch.cat(parts))
    assert all(torch.equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0], plain_attention(q, k, v, 0, window), rtol=0.0, atol=1e-5)


@pytest.mark.parametrize(
    ("head_dim", "group", "block_size"), [(4, 1, 1), (8, 70, 16), (24, 7, 8), (64, 3, 48), (80, 1, 200), (128, 4, 16)]
)
def test_heads_groups_and_blocks_of_any_size(head_dim: int, group: int, block_size: int) -> None:
    torch.manual_seed(head_dim)
    spec = msgspec.structs.replace(SPEC, num_heads=2 * group, head_dim=head_dim)
    kv = torch.full((1, 2, 200, block_size, 2, head_dim), torch.nan)
    attention = CpuAttention(spec, kv, torch.randperm(200, dtype=torch.int32).unsqueeze(0))
    keys, values = torch.randn(150, 2, head_dim), torch.randn(150, 2, head_dim)
    for start, end in ((0, 149), (149, 150)):
        q = torch.randn(end - start, 2 * group, head_dim)
        attention.plan(AttentionRows([0], [start], [end - start]))
        got = attention.run(0, q, keys[start:end], values[start:end])
        expected = plain_attention(q, keys[:end], values[:end], start, None)
        torch.testing.assert_close(got, expected, rtol=0.0, atol=1e-5)
