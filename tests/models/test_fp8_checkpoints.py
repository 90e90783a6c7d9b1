"""Checkpoints in FP8 of both formats: read as they are, computed as their scales say, else refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, Driver, empty_weights, prompt, reference_logits, save_tiny
from torch import nn
from transformers import PreTrainedModel

from tidegate.base.errors import ModelError
from tidegate.base.specs import Fp8Checkpoint
from tidegate.kernels.fp8 import E4M3, saturated
from tidegate.models.config import spec_from_hf
from tidegate.models.fp8_checkpoint import fp8_checkpoint, is_kept
from tidegate.models.fp8_weights import kv_scales
from tidegate.models.linears import load, stored
from tidegate.models.sources import open_model

INPUT_SCALE = 0.03
PLAIN = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
_E4M3 = {"num_bits": 8, "type": "float", "symmetric": True}


def compressed(weights: str, **inputs: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {**_E4M3, "strategy": weights, "dynamic": False},
        "input_activations": {**_E4M3, **inputs},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*layers[.]1[.]mlp.*", "re:.*mlp[.]gate$"],
    }


FORMATS = {
    "plain, static inputs": PLAIN,
    "plain, dynamic inputs": {**PLAIN, "activation_scheme": "dynamic"},
    "compressed, a scale a row, dynamic inputs": compressed("channel", strategy="token", dynamic=True),
    "compressed, static inputs": compressed("tensor", strategy="tensor", dynamic=False),
}
Change = Callable[[dict[str, torch.Tensor]], Any]


def save(folder: Path, config: dict[str, Any], family: str = "llama", change: Change = lambda tensors: None) -> Any:
    """Saves a tiny model as an FP8 checkpoint; returns transformers' float model, with the rounded weights."""
    model = save_tiny(FAMILIES[family], folder)
    description = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**description, "quantization_config": config}))
    meaning = fp8_checkpoint(config)
    by_row = '"channel"' in json.dumps(config)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(".weight") and tensors[name].dim() == 2]:
        module = name.removesuffix(".weight")
        if is_kept(module, meaning) or "embed" in name:
            continue
        weight = tensors[name]
        amax = weight.abs().amax(1, keepdim=True) if by_row else weight.abs().max()
        scale = amax / 448.0
        tensors[name] = saturated(weight, scale)
        tensors[module + ".weight_scale"] = scale
        if meaning.static_inputs:
            tensors[module + ".input_scale"] = torch.tensor(INPUT_SCALE)
    change(tensors)
    save_file(tensors, file)
    return model


def rounding_inputs(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """transformers' model as the checkpoint says that it is to be computed: by its quantised modules."""
    tensors = load_file(folder / "model.safetensors")

    def round_input(module: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        x = inputs[0]
        scale = module.scale if module.scale is not None else x.abs().amax(-1, keepdim=True) / 448.0
        return (saturated(x, scale).float() * scale,)

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name + ".weight_scale" in tensors:
            module.weight.data = tensors[name + ".weight"].float() * tensors[name + ".weight_scale"]
            module.scale = tensors.get(name + ".input_scale")
            module.register_forward_pre_hook(round_input)
    return model


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.replace(", ", "-").replace(" ", "-"))
def test_logits_are_those_of_the_modules_that_the_checkpoint_describes(form: str, tmp_path: Path) -> None:
    model = rounding_inputs(save(tmp_path, FORMATS[form]), tmp_path)
    tokens = prompt(40)
    expected = reference_logits(model, tokens)
    error = Driver(str(tmp_path)).feed(0, tokens, 40) - expected
    assert error.std() < 0.02 * expected.std()  # now and then a sum in another order rounds to the other neighbour


def test_weights_lie_in_memory_as_they_lie_in_the_file(tmp_path: Path) -> None:
    save(tmp_path, FORMATS["compressed, a scale a row, dynamic inputs"])
    source = open_model(str(tmp_path))
    weights, tensors = empty_weights(source.spec), load_file(tmp_path / "model.safetensors")
    load(source, weights)
    attention = "model.layers.2.self_attn."
    for name, kind in (("qkv", torch.uint8), ("qkv_scale", torch.float32)):
        suffix = "weight_scale" if "scale" in name else "weight"
        rows = [tensors[f"{attention}{part}_proj.{suffix}"].view(kind) for part in "qkv"]
        assert torch.equal(weights["layers.2." + name].view(kind).flatten(), torch.cat(rows).flatten())
    assert weights["layers.0.down"].dtype == E4M3
    assert weights["layers.1.down"].dtype == torch.float32, "kept, by a regular expression"
    assert weights["lm_head"].dtype == torch.float32
    assert not any(weight.float().isnan().any() for weight in weights.values())


def test_experts_are_read_with_their_scales(tmp_path: Path) -> None:
    save(tmp_path, {**FORMATS["plain, dynamic inputs"], "ignored_layers": ["lm_head", "gate"]}, "qwen3 moe")
    source = open_model(str(tmp_path))
    weights, tensors = empty_weights(source.spec), load_file(tmp_path / "model.safetensors")
    load(source, weights)
    name = "model.layers.1.mlp.experts.2.down_proj."
    rows = slice(2 * source.spec.hidden_size, 3 * source.spec.hidden_size)
    assert torch.equal(
        weights["layers.1.experts_down"][rows].view(torch.uint8), tensors[name + "weight"].view(torch.uint8)
    )
    assert (weights["layers.1.experts_down_scale"][rows] == tensors[name + "weight_scale"]).all()


def test_of_several_scales_of_one_input_the_largest_counts(tmp_path: Path) -> None:
    def enlarge(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.k_proj.input_scale"] = torch.tensor([0.5])

    save(tmp_path, PLAIN, change=enlarge)
    source = open_model(str(tmp_path))
    weights = empty_weights(source.spec)
    load(source, weights)
    assert weights["layers.0.qkv_input_scale"].item() == 0.5
    assert weights["layers.1.qkv_input_scale"].item() == pytest.approx(INPUT_SCALE)


@pytest.mark.parametrize("name", ["{}_scale", "{}_proj.{}_scale", "{}_proj.output_scale"])
def test_scales_of_keys_and_values_are_found_by_each_of_their_names(name: str, tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        for kind, scale in (("k", 0.25), ("v", 2.0)):
            tensors["model.layers.1.self_attn." + name.replace("{}", kind)] = torch.tensor([scale])

    save(tmp_path, PLAIN, change=add)
    source = open_model(str(tmp_path))
    weights = empty_weights(source.spec)
    load(source, weights)
    assert kv_scales(source.spec, weights) == ((1.0, 1.0), (0.25, 2.0), (1.0, 1.0))


def test_a_scale_that_is_missing_is_named(tmp_path: Path) -> None:
    save(tmp_path, PLAIN, change=lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight_scale"))
    source = open_model(str(tmp_path))
    with pytest.raises(ModelError, match=r"no tensor 'model\.layers\.1\.mlp\.up_proj\.weight_scale'"):
        load(source, empty_weights(source.spec))


@pytest.mark.parametrize("wanted", ["quantised", "kept"])
def test_a_tensor_of_another_type_than_the_configuration_says_is_refused(wanted: str, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj"

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name + ".weight"] = tensors[name + ".weight"].to(torch.float32 if wanted == "quantised" else E4M3)

    kept = ["lm_head"] if wanted == "quantised" else ["lm_head", name]
    save(tmp_path, {**PLAIN, "ignored_layers": kept}, change=spoil)
    source = open_model(str(tmp_path))
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.down_proj\.weight.* by its configuration it is"):
        load(source, empty_weights(source.spec))


def test_int8_of_an_fp8_checkpoint_and_half_kept_matrices_are_refused(tmp_path: Path) -> None:
    save(tmp_path, PLAIN)
    with pytest.raises(ModelError, match="stored in FP8: it can't be quantized to int8"):
        stored(open_model(str(tmp_path)).spec, "int8")
    save(tmp_path, {**PLAIN, "ignored_layers": ["lm_head", "model.layers.0.self_attn.k_proj"]})
    with pytest.raises(ModelError, match=r"layers\.0\.q, layers\.0\.k, layers\.0\.v the checkpoint quantizes some"):
        stored(open_model(str(tmp_path)).spec, None)


def test_names_of_kept_modules_are_whole_words_or_expressions() -> None:
    checkpoint = Fp8Checkpoint(False, ("lm_head", "mlp.gate", "re:.*[.]0[.].*up_proj"))
    kept = ["lm_head", "model.layers.3.mlp.gate", "model.layers.0.mlp.up_proj"]
    others = ["model.layers.3.mlp.gate_proj", "model.layers.1.mlp.up_proj", "model.lm_head_2"]
    assert [is_kept(name, checkpoint) for name in kept + others] == [True] * 3 + [False] * 3


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"quant_method": "awq"}, "of kind 'awq' are not supported"),
        ({**PLAIN, "weight_block_size": [128, 128]}, "each block"),
        (compressed("group", strategy="token", dynamic=True), "a scale for each group"),
        (compressed("tensor", strategy="token", dynamic=False), "for whole tensors"),
        (compressed("channel", strategy="token", dynamic=True) | {"config_groups": {}}, "all linear layers"),
        (
            json.loads(json.dumps(compressed("channel", strategy="token")).replace('"num_bits": 8', '"num_bits": 4')),
            "4 bits",
        ),
    ],
)
def test_other_kinds_are_refused_in_one_sentence(config: dict[str, Any], reason: str) -> None:
    llama = FAMILIES["llama"].to_dict() | {"architectures": ["LlamaForCausalLM"], "quantization_config": config}
    with pytest.raises(ModelError, match=reason) as refusal:
        spec_from_hf(llama)
    assert "\n" not in str(refusal.value)
