"""Float32 on a GPU, kernel by kernel: transformers' logits, and the same tokens in every mode and as on the CPU."""

import pytest
import torch
from engine_driver import SLO, EngineDriver, mixed_prompts, reference
from gpu_models import tiny

from tidegate.base.batch import Batch, Slice
from tidegate.base.specs import PoolSpec
from tidegate.device.pool import Pool
from tidegate.kernels.torch_attention import TorchAttention
from tidegate.models.demo import demo_model_path
from tidegate.models.registry import build_model
from tidegate.models.sources import open_model
from tidegate.models.weights import layout
from tidegate.node.config import EngineConfig
from tidegate.policy.modes import MODES
from tidegate.runner.eager_runner import plain_attention
from tidegate.runner.inputs import build_inputs, store_tokens

MAX_TOKENS = 16


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A directory, and transformers' model of it on the CPU."""
    model = tiny("llama", head_dim=48, num_attention_heads=8)  # a head size that the fast kernels do not know either
    folder = tmp_path_factory.mktemp("float32")
    model.save_pretrained(folder)
    return str(folder), model


@torch.inference_mode()
def test_logits_are_transformers(small):
    path, model = small
    plain_attention()
    torch.set_float32_matmul_precision("highest")
    source = open_model(path)
    weights = {name: torch.empty(shape, device="cuda") for name, shape in layout(source.spec).items()}
    source.load(weights, lambda fraction: None)
    pool = Pool.allocate(source.spec, PoolSpec(40, 16, 2, 600), "cuda")
    pool.table[0, :38] = torch.randperm(38).int()
    prompt = torch.randint(0, 1000, (555,), generator=torch.Generator().manual_seed(2)).tolist()
    attention = TorchAttention(source.spec, pool.kv, pool.table.cpu())
    step = Batch(0, 1.0, [Slice(0, 0, prompt, True)], [], [], [], [])
    store_tokens(step, pool.tokens)
    inputs = build_inputs(step, pool.tokens)
    attention.plan(inputs.rows)
    ours = build_model(source.spec, weights, attention)
    logits = ours.logits(ours.forward(inputs.tokens, inputs.positions)).cpu()
    theirs = model(torch.tensor([prompt])).logits[0]
    assert (logits - theirs).abs().max() < 1e-3 * theirs.abs().max()


def test_tokens_are_transformers_in_every_mode(small):
    path, model = small
    references = [reference(model, prompt, MAX_TOKENS) for prompt in mixed_prompts(16, 1000, 1000)]
    asked = EngineConfig(
        model=path, device="cuda", dtype="float32", max_model_len=1100, num_blocks=1200, max_num_seqs=20, slo=SLO
    )
    with EngineDriver(asked) as engine:
        assert "float32" in engine.engine.info.device and "without graphs" in engine.engine.info.device
        for mode in MODES:
            engine.run(engine.engine.set_mode(mode))
            answers = engine.answers([engine.spec(r.prompt, MAX_TOKENS) for r in references])
            ties = sum(r.check(a.tokens, mode) for r, a in zip(references, answers, strict=True))
            assert ties <= 4, f"{mode}: ties should be rare"
            engine.run(engine.engine.reset_prefix_cache())


def test_bfloat16_without_fast_kernels_still_serves(small):
    with EngineDriver(EngineConfig(model=small[0], device="cuda", max_model_len=600, num_blocks=200)) as engine:
        assert "heads of 48" in engine.engine.info.device
        (answer,) = engine.answers([engine.spec([1, 2, 3], 8)])
        assert len(answer.tokens) == 8


def test_smollm2_answers_on_the_gpu_as_on_the_cpu():
    path = str(demo_model_path())
    prompts = mixed_prompts(8, 400, 40_000, seed=9)
    tokens = {}
    for device in ("cpu", "cuda"):
        asked = EngineConfig(model=path, device=device, dtype="float32", max_model_len=512, num_blocks=400)
        with EngineDriver(asked) as engine:
            tokens[device] = [a.tokens for a in engine.answers([engine.spec(p, 32) for p in prompts])]
    assert tokens["cpu"] == tokens["cuda"]
