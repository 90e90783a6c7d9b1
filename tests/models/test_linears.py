"""Int8 models: what is stored, how near they are to the float model, and that rows don't see each other."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tiny_models import FAMILIES, Driver, empty_weights, prompt, reference_logits, save_tiny
from transformers import PreTrainedModel

from tidegate.base.errors import ModelError
from tidegate.base.specs import ModelSpec
from tidegate.kernels.cpu_attention import CpuAttention
from tidegate.kernels.int8_linear import activation_levels, take_spread_inputs
from tidegate.models.linears import load, stored, stored_bytes
from tidegate.models.matrices import matrices
from tidegate.models.rotation import Rotation, rotate
from tidegate.models.sources import open_model

NAMES = ["llama", "llama tied, one KV head", "llama, all heads KV heads, biases", "qwen3"]


@pytest.fixture(scope="module", params=NAMES, ids=lambda name: name.replace(", ", "-").replace(" ", "-"))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, str]:
    folder: Path = tmp_path_factory.mktemp("model")
    return save_tiny(FAMILIES[request.param], folder), str(folder)


def int8(path: str, **options: str) -> Driver:
    return Driver(path, quantization="int8", backend=CpuAttention, **options)


def float_weights(path: str) -> tuple[ModelSpec, dict[str, torch.Tensor]]:
    """All of a model's weights; ``lm_head`` is always a tensor of its own."""
    source = open_model(path)
    weights = empty_weights(source.spec)
    load(source, weights)
    weights.setdefault("lm_head", weights["embed"].clone())
    return msgspec.structs.replace(source.spec, tied_embeddings=False), weights


def test_turning_a_model_changes_its_stream_and_not_what_it_computes(family: tuple[PreTrainedModel, str]) -> None:
    model, path = family
    spec, weights = float_weights(path)
    embedding = weights["embed"].clone()
    rotate(spec, weights)
    assert (weights["embed"] - embedding).abs().mean() > 0.1 * embedding.abs().mean()
    tokens = prompt(30)
    logits = Driver.over(spec, weights).feed(0, tokens, 30)
    torch.testing.assert_close(logits, reference_logits(model, tokens), rtol=0.0, atol=2e-4)


@pytest.mark.parametrize("size", [1, 2, 9, 48, 576, 8192])
def test_a_rotation_keeps_lengths_and_spreads_an_outlier_over_all_channels(size: int) -> None:
    rotation = Rotation(size)
    one = torch.zeros(3, size)
    one[:, size // 2] = 10.0
    rotation.turn_inputs(one)
    torch.testing.assert_close(one.norm(dim=1), torch.full((3,), 10.0))
    odd = size
    while odd % 2 == 0:
        odd //= 2
    assert one.abs().max() <= 10.0 / (size / odd) ** 0.5 + 1e-5
    x, matrix = torch.randn(4, size), torch.randn(5, size)
    expected = x @ matrix.T
    rotation.turn_inputs(x)
    rotation.turn_inputs(matrix)
    torch.testing.assert_close(x @ matrix.T, expected, rtol=1e-4, atol=1e-3)


def test_every_matrix_of_the_turned_model_is_stored_as_int8_with_scales(family: tuple[PreTrainedModel, str]) -> None:
    source = open_model(family[1])
    spec, floats = float_weights(family[1])
    rotate(spec, floats)
    quantised = empty_weights(source.spec, "int8")
    fractions: list[float] = []
    load(source, quantised, fractions.append)
    assert fractions[-1] == 1.0
    for name in matrices(source.spec):
        if name.endswith(".down"):
            take_spread_inputs(floats[name])
        scale = quantised[name + "_scale"].unsqueeze(1)
        assert quantised[name].dtype == torch.int8
        assert ((quantised[name] * scale - floats[name]).abs() <= 0.5001 * scale).all()
    for name in floats.keys() - set(matrices(source.spec)):
        assert torch.equal(quantised[name], floats[name])


def test_int8_needs_about_a_quarter_of_the_memory_of_what_is_multiplied(family: tuple[PreTrainedModel, str]) -> None:
    spec = open_model(family[1]).spec
    rest = 4 * spec.vocab_size * spec.hidden_size  # the embedding
    assert stored_bytes(spec, "int8") - rest < 0.45 * (stored_bytes(spec, None) - rest * spec.tied_embeddings)


def test_logits_are_near_the_float_models(family: tuple[PreTrainedModel, str]) -> None:
    model, path = family
    tokens = prompt(40)
    expected = reference_logits(model, tokens)
    error = int8(path).feed(0, tokens, 40) - expected
    assert 0.0 < error.std() < 0.1 * expected.std()


def test_a_prompts_logits_are_the_same_however_it_is_cut_and_whoever_is_beside_it(
    family: tuple[PreTrainedModel, str],
) -> None:
    """To the bit: every sum has its order, and integers are exact."""
    _, path = family
    tokens = prompt(30)
    whole = int8(path).feed(0, tokens, 30)
    crowd = int8(path, blocks="two runs")
    rows = []
    for start, end in ((0, 10), (10, 23), *((i, i + 1) for i in range(23, 30))):
        others = [(slot, prompt(2 + slot, start + slot)) for slot in (1, 2, 3)]
        rows.append(crowd.step([*others[:2], (0, tokens[start:end]), others[2]])[2])
    assert torch.equal(torch.cat(rows), whole)


def test_the_real_model_answers_as_likely_in_int8_as_in_float(smollm2: tuple[str, PreTrainedModel, Any]) -> None:
    """What a user notices: along float32's greedy answers, how much less likely int8 finds them."""
    path, _, tokenizer = smollm2
    exact = Driver(path, 3, 128, backend=CpuAttention)
    rounding = Driver(path, 3, 128, quantization="int8", backend=CpuAttention)
    divergences = []
    for slot, question in enumerate(
        ("What is the capital of France?", "Name three colors.", "What does HTTP stand for?")
    ):
        messages = [{"role": "user", "content": question}]
        tokens = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])
        logits = [exact.step([(slot, tokens)])[0][-1:]]
        while len(logits) < 16 and (token := int(logits[-1].argmax())) != tokenizer.eos_token_id:
            tokens.append(token)
            logits.append(exact.step([(slot, [token])])[0])
        rounded = rounding.step([(slot, tokens)])[0]
        likely = torch.cat(logits).log_softmax(-1)
        divergence = likely.exp() * (likely - rounded[-len(logits) :].log_softmax(-1))
        divergences.append(float(divergence.sum(-1).mean()))
        if "France" in question:
            assert "Paris" in tokenizer.decode(tokens)
    assert 0.0 < sum(divergences) / 3 < (0.007 if activation_levels() == 127 else 0.02), divergences


def test_an_unknown_quantization_is_refused(family: tuple[PreTrainedModel, str]) -> None:
    with pytest.raises(ModelError, match="choose from int8"):
        stored(open_model(family[1]).spec, "int3")


@pytest.mark.parametrize("name", ["mixtral", "deepseek v3"])
def test_int8_experts_are_refused(name: str, tmp_path: Path) -> None:
    save_tiny(FAMILIES[name], tmp_path)
    with pytest.raises(ModelError, match="mixtures of experts"):
        stored(open_model(str(tmp_path)).spec, "int8")
