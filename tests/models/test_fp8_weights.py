"""Models in FP8, quantised as they are read: what is stored, how near they are, and that rows don't see each other."""

from pathlib import Path

import pytest
import torch
from tiny_models import FAMILIES, Driver, empty_weights, prompt, reference_logits, save_tiny
from transformers import PreTrainedModel

from tidegate.base.errors import ModelError
from tidegate.base.specs import Fp8Checkpoint, ModelSpec, Shard
from tidegate.kernels.cpu_attention import CpuAttention
from tidegate.kernels.fp8 import E4M3, quantise_rows
from tidegate.models.fp8_weights import fp8_tensors
from tidegate.models.linears import load, stored, stored_bytes
from tidegate.models.shards import divide
from tidegate.models.sources import open_model

NAMES = [
    "llama",
    "llama tied, one KV head",
    "llama, all heads KV heads, biases",
    "qwen3",
    "mixtral",
    "qwen2 moe",
    "deepseek v3",
]


@pytest.fixture(scope="module", params=NAMES, ids=lambda name: name.replace(", ", "-").replace(" ", "-"))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, str]:
    folder: Path = tmp_path_factory.mktemp("model")
    return save_tiny(FAMILIES[request.param], folder), str(folder)


def fp8(path: str, **options: str) -> Driver:
    return Driver(path, quantization="fp8", backend=CpuAttention, **options)


def test_every_large_matrix_of_sizes_that_gpus_take_is_rounded_row_by_row_and_nothing_else_changes(
    family: tuple[PreTrainedModel, str],
) -> None:
    source = open_model(family[1])
    floats, quantised = empty_weights(source.spec), empty_weights(source.spec, "fp8")
    load(source, floats)
    fractions: list[float] = []
    load(source, quantised, fractions.append)
    assert fractions[-1] == 1.0
    matrices = {name for name, (dtype, _) in fp8_tensors(source.spec).items() if dtype == "float8_e4m3fn"}
    large = {"qkv", "q", "q_a", "q_b", "kv_a", "o", "gate_up", "down", "shared_gate_up", "shared_down"}
    fitting = [name for name, weight in floats.items() if weight.dim() == 2 and not any(n % 16 for n in weight.shape)]
    wanted = {name for name in fitting if name.rpartition(".")[2] in large}
    wanted |= {name for name in floats if name.endswith(("experts_gate_up", "experts_down"))}
    assert matrices == wanted != set()
    for name in matrices:
        assert quantised[name].dtype == E4M3
        scale = quantised[name + "_scale"].unsqueeze(1)
        rounded = quantised[name].float() * scale
        # Half a step: of 3 bits of mantissa, and below 2^-6 a fixed one.
        assert ((rounded - floats[name]).abs() <= floats[name].abs() * 2**-4 + scale * 2**-10).all()
    for name in floats.keys() - matrices:
        assert torch.equal(quantised[name], floats[name])


def test_a_matrix_in_fp8_needs_a_quarter_of_float32s_memory_and_half_of_bfloat16s(
    family: tuple[PreTrainedModel, str],
) -> None:
    spec = open_model(family[1]).spec
    for dtype, bytes_each in (("float32", 4), ("bfloat16", 2)):
        saved = stored_bytes(spec, None, dtype) - stored_bytes(spec, "fp8", dtype)
        matrices = [shape for kind, shape in fp8_tensors(spec).values() if kind == "float8_e4m3fn"]
        assert saved == sum(rows * ((bytes_each - 1) * columns - 4) for rows, columns in matrices)


def test_logits_are_near_the_float_models(family: tuple[PreTrainedModel, str]) -> None:
    model, path = family
    tokens = prompt(40)
    expected = reference_logits(model, tokens)
    error = (fp8(path).feed(0, tokens, 40) - expected).flatten()
    # A router near a tie sends a token elsewhere, whose logits are others then.
    typical = (
        error.abs().median() if model.config.model_type in ("mixtral", "qwen2_moe", "deepseek_v3") else error.std()
    )
    assert 0.0 < typical < 0.25 * expected.std()


def test_a_prompts_logits_are_the_same_however_it_is_cut_and_whoever_is_beside_it(
    family: tuple[PreTrainedModel, str],
) -> None:
    """Up to where float sums, which differ in order, move a value over an edge between two levels."""
    _, path = family
    tokens = prompt(30)
    whole = fp8(path).feed(0, tokens, 30)
    crowd = fp8(path, blocks="two runs")
    rows = []
    for start in range(0, 30, 10):
        others = [(slot, prompt(7 + slot, start + slot)) for slot in (1, 2, 3)]
        rows.append(crowd.step([*others[:2], (0, tokens[start : start + 10]), others[2]])[2])
    different = torch.cat(rows)
    assert ((different - whole).abs().amax(1) < 0.05 * whole.std()).float().mean() > 0.9
    assert (different.argmax(-1) == whole.argmax(-1)).float().mean() > 0.9


@pytest.mark.parametrize(("asked", "checkpoint"), [("fp8", None), (None, Fp8Checkpoint(static_inputs=False))])
def test_weights_in_fp8_are_not_divided_among_ranks(asked: str | None, checkpoint: Fp8Checkpoint | None) -> None:
    whole = ModelSpec("LlamaForCausalLM", 4, 64, 4, 2, 16, 128, 500, 4096, fp8=checkpoint)
    with pytest.raises(ModelError, match="tensor-parallel-size"):
        stored(divide(whole, Shard(1, 2)), asked)


def test_a_row_is_quantised_alone_as_it_is_beside_a_far_larger_one() -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    x[1] *= 1e4
    x[2] = 0.0
    rounded, scale = quantise_rows(x)
    for row in range(3):
        alone, its_scale = quantise_rows(x[row : row + 1])
        assert torch.equal(alone.view(torch.uint8), rounded[row : row + 1].view(torch.uint8))
        assert its_scale == scale[row]
    assert rounded.float().isfinite().all() and rounded[:2].float().abs().amax(1).tolist() == [448.0, 448.0]
