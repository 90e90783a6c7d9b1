"""``open_model``: which reader a path gets, what loads, and what is said when it can't."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, Driver, prompt, reference_logits, save_tiny

from tidegate.base.errors import ModelError
from tidegate.models.sources import ModelSource, open_model
from tidegate.models.weights import layout


def loaded(source: ModelSource, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    weights = {name: torch.full(shape, torch.nan, dtype=dtype) for name, shape in layout(source.spec).items()}
    source.load(weights, lambda fraction: None)
    return weights


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    reference = save_tiny(FAMILIES["qwen3"], tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    tokens = prompt(9)
    ours = Driver(str(tmp_path)).feed(0, tokens, 9)
    torch.testing.assert_close(ours, reference_logits(reference, tokens), rtol=0.0, atol=1e-4)


def test_loading_fills_every_element_in_the_tensors_given_and_reports_progress(tmp_path: Path) -> None:
    save_tiny(FAMILIES["llama, all heads KV heads, biases"], tmp_path)
    source = open_model(str(tmp_path))
    weights = {name: torch.full(shape, torch.nan) for name, shape in layout(source.spec).items()}
    addresses = {name: weight.data_ptr() for name, weight in weights.items()}
    fractions: list[float] = []
    source.load(weights, fractions.append)
    assert not any(weight.isnan().any() for weight in weights.values())
    assert {name: weight.data_ptr() for name, weight in weights.items()} == addresses
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


def test_weights_are_converted_to_the_type_of_their_place(tmp_path: Path) -> None:
    save_tiny(FAMILIES["llama"], tmp_path)
    source = open_model(str(tmp_path))
    exact, rounded = loaded(source), loaded(source, torch.bfloat16)
    assert all(torch.equal(exact[name].bfloat16(), rounded[name]) for name in exact)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    save_tiny(FAMILIES["llama"], tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"no tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        loaded(open_model(str(tmp_path)))


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    save_tiny(FAMILIES["llama"], tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.ones(47)
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"'model\.norm\.weight'.* is \(47,\); expected \(48,\)"):
        loaded(open_model(str(tmp_path)))


def test_a_missing_or_damaged_shard_is_a_model_error(tmp_path: Path) -> None:
    save_tiny(FAMILIES["llama"], tmp_path, max_shard_size="40KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    with pytest.raises(ModelError, match="Can't read the weights"):
        loaded(open_model(str(tmp_path)))
    shard.unlink()
    with pytest.raises(ModelError, match=shard.name):
        open_model(str(tmp_path))


def test_the_tokenizer_is_where_its_files_are(tmp_path: Path) -> None:
    save_tiny(FAMILIES["llama"], tmp_path)
    assert open_model(str(tmp_path)).tokenizer_dir is None
    (tmp_path / "tokenizer.json").write_text("{}")
    assert open_model(str(tmp_path)).tokenizer_dir == tmp_path
    assert open_model(str(tmp_path)).gguf_file is None


def test_end_ids_of_the_generation_config_count_too(tmp_path: Path) -> None:
    save_tiny(FAMILIES["llama"], tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 2, 11]}))
    assert open_model(str(tmp_path)).spec.eos_ids == (2, 9, 11)


class TestDummy:
    @pytest.fixture(params=["qwen2", "qwen2 moe", "deepseek v3"])
    def config(self, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
        family = FAMILIES[request.param]
        family.architectures = [type(family).__name__.replace("Config", "ForCausalLM")]
        family.save_pretrained(tmp_path)
        return tmp_path / "config.json"

    def test_needs_only_a_configuration(self, config: Path) -> None:
        for path in (config, config.parent):
            weights = loaded(open_model(str(path), load_format="dummy"))
            assert not any(weight.isnan().any() for weight in weights.values())

    def test_weights_are_a_function_of_the_seed_and_differ_between_tensors(self, config: Path) -> None:
        first, again = (loaded(open_model(str(config), "dummy", seed=3)) for _ in range(2))
        other = loaded(open_model(str(config), "dummy", seed=4))
        assert all(torch.equal(first[name], again[name]) for name in first)
        assert not any(torch.equal(first[name], other[name]) for name in first)
        assert not torch.equal(first["layers.0.o"], first["layers.1.o"])

    def test_greedy_output_is_not_degenerate(self, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tiny_models.open_model", lambda path: open_model(path, "dummy"))
        logits = Driver(str(config)).feed(0, prompt(50), 50)
        assert 0.3 < logits.std() < 3.0
        assert len(set(logits.argmax(-1).tolist())) > 10

    def test_norms_are_near_one(self, config: Path) -> None:
        weights = loaded(open_model(str(config), "dummy"))
        for name in ("norm", "layers.0.attn_norm", "layers.2.mlp_norm"):
            assert 0.8 < weights[name].min() < weights[name].max() < 1.2


class TestRefusals:
    def test_nothing_there(self, tmp_path: Path) -> None:
        for path in (str(tmp_path / "nothing"), "./nothing", "nothing.gguf", "a/b/c"):
            with pytest.raises(ModelError, match="no file or directory"):
                open_model(path)

    def test_an_empty_directory(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"no config\.json"):
            open_model(str(tmp_path))

    def test_a_configuration_without_weights(self, tmp_path: Path) -> None:
        save_tiny(FAMILIES["llama"], tmp_path)
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(ModelError, match=r"no \*\.safetensors"):
            open_model(str(tmp_path))
        with pytest.raises(ModelError, match="only a configuration"):
            open_model(str(tmp_path / "config.json"))

    def test_a_broken_configuration(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(ModelError, match="Can't read"):
            open_model(str(tmp_path), "dummy")

    def test_an_unknown_load_format(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="choose from auto, safetensors, gguf, dummy"):
            open_model(str(tmp_path), "npz")

    def test_a_hub_id_offline(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        with pytest.raises(ModelError, match="'owner/name' is neither a path that exists nor in the local cache"):
            open_model("owner/name")


def test_a_hub_id_in_the_local_cache_is_opened_without_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "models--owner--name"
    save_tiny(FAMILIES["mistral"], cache / "snapshots" / ("0" * 40))
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    assert open_model("owner/name").spec.architecture == "MistralForCausalLM"
