"""A lane over a tiny Llama with random weights, and batches written in one line."""

import torch

from tidegate.base.batch import Batch, Slice, SlotSetup, TableUpdate
from tidegate.base.request import SamplingParams
from tidegate.base.specs import ModelSpec, PoolSpec
from tidegate.device.pool import Pool
from tidegate.kernels.torch_attention import TorchAttention
from tidegate.models.registry import build_model
from tidegate.models.weights import layout
from tidegate.runner.inputs import apply_tables
from tidegate.runner.runner import Runner

MODEL = ModelSpec(
    architecture="LlamaForCausalLM",
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=48,
    vocab_size=101,
    max_len=64,
)
POOL = PoolSpec(num_blocks=80, block_size=4, max_num_seqs=4, max_model_len=64)


def random_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) * 0.5 for name, shape in layout(MODEL).items()}


WEIGHTS = random_weights()


def new_pool() -> Pool:
    """Every slot has all its blocks, scattered over the KV array."""
    pool = Pool.allocate(MODEL, POOL)
    blocks = torch.randperm(POOL.num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
    width = POOL.max_blocks_per_seq
    updates = [TableUpdate(slot, 0, blocks[slot * width : (slot + 1) * width]) for slot in range(POOL.max_num_seqs)]
    apply_tables(pool.table, updates)
    return pool


def new_runner(pool: Pool) -> Runner:
    attention = TorchAttention(MODEL, pool.kv, pool.table)
    return Runner(build_model(MODEL, WEIGHTS, attention), attention, pool, MODEL)


def batch(
    slices: list[Slice] | None = None,
    decodes: dict[int, int] | None = None,
    setups: list[SlotSetup] | None = None,
    batch_id: int = 0,
) -> Batch:
    """``decodes`` has the position of each decoded slot's input token."""
    decodes = decodes or {}
    return Batch(batch_id, 1.0, slices or [], list(decodes), list(decodes.values()), [], setups or [])


def generate(runner: Runner, prompt: list[int], count: int, params: SamplingParams, slot: int = 0) -> list[int]:
    """``count`` tokens, one request alone: the whole prompt in one slice, then one decode at a time."""
    setup = [SlotSetup(slot, len(prompt), params)]
    tokens = runner.run(batch([Slice(slot, 0, prompt, True)], setups=setup)).tokens
    while len(tokens) < count:
        tokens += runner.run(batch(decodes={slot: len(prompt) + len(tokens) - 1})).tokens
    return tokens
