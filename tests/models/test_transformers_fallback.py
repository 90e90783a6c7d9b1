"""Models by transformers' own modules: what is found out about them, how their weights come, and what is refused.

That their logits and tokens are right is tested with the other families'.
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import FALLBACK_FAMILIES, Driver, prompt, reference_logits, save_tiny
from transformers import (
    BloomConfig,
    FalconH1Config,
    Gemma2Config,
    GptOssConfig,
    GraniteModel,
    Llama4TextConfig,
    MambaConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3NextConfig,
)

from tidegate.base.errors import ModelError
from tidegate.base.specs import ModelSpec
from tidegate.models.linears import stored
from tidegate.models.sources import open_model
from tidegate.models.transformers_config import spec_from_transformers
from tidegate.models.transformers_fallback import skeleton
from tidegate.models.weights import layout

SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip


def spec_of(config: PreTrainedConfig, architecture: str, **changes: Any) -> ModelSpec:
    return spec_from_transformers({**config.to_dict(), "architectures": [architecture], **changes})


def test_shapes_and_windows_are_those_that_attention_is_called_with() -> None:
    spec = spec_of(FALLBACK_FAMILIES["gemma3"], "Gemma3ForCausalLM")
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (3, 4, 2, 16)
    assert (spec.sliding_window, spec.layer_windows) == (None, (6, None, 6))
    spec = spec_of(FALLBACK_FAMILIES["gpt2"], "GPT2LMHeadModel")
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (3, 4, 4, 12)
    assert (spec.vocab_size, spec.max_len, spec.eos_ids, spec.bos_id) == (97, 128, (2,), 1)
    assert spec_of(FALLBACK_FAMILIES["phi3"], "Phi3ForCausalLM").sliding_window == 7


def test_that_it_is_slower_is_said_once_when_the_model_is_opened(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="tidegate"):
        spec_of(FALLBACK_FAMILIES["granite"], "GraniteForCausalLM")
    assert [record.getMessage() for record in caplog.records if record.name.startswith("tidegate")] == [
        "GraniteForCausalLM is computed by transformers' own modules: right, but slower than a family of our own"
    ]


def test_modules_are_made_without_memory_for_weights_and_with_their_buffers() -> None:
    model = skeleton(spec_of(FALLBACK_FAMILIES["gpt neox"], "GPTNeoXForCausalLM"))
    assert all(parameter.is_meta for parameter in model.parameters())
    buffers = dict(model.named_buffers())
    assert buffers and not any(buffer.is_meta for buffer in buffers.values())


def test_tied_tensors_are_stored_once() -> None:
    names = layout(spec_of(FALLBACK_FAMILIES["gpt2"], "GPT2LMHeadModel"))
    assert "transformer.wte.weight" in names and "lm_head.weight" not in names


def test_checkpoints_of_the_bare_decoder_load_too(tmp_path: Path) -> None:
    model = save_tiny(FALLBACK_FAMILIES["gpt2"], tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}, file)
    tokens = prompt(9)
    ours = Driver(str(tmp_path)).feed(0, tokens, 9)
    torch.testing.assert_close(ours, reference_logits(model, tokens), rtol=0.0, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "tensor"),
    [("gpt neox", "gpt_neox.layers.1.mlp.dense_h_to_4h.weight"), ("olmoe", "model.layers.1.mlp.gate.weight")],
)
def test_a_missing_tensor_is_named(family: str, tensor: str, tmp_path: Path) -> None:
    save_tiny(FALLBACK_FAMILIES[family], tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors[tensor]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"no tensor '{tensor}'"):
        Driver(str(tmp_path))


def test_dummy_weights_give_logits_with_a_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**FALLBACK_FAMILIES["phi3"].to_dict(), "architectures": ["Phi3ForCausalLM"]})
    )
    monkeypatch.setattr("tiny_models.open_model", lambda path: open_model(path, "dummy"))
    logits = Driver(str(tmp_path)).feed(0, prompt(50), 50)
    assert 0.3 < logits.std() < 3.0
    assert len(set(logits.argmax(-1).tolist())) > 10


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}


@pytest.mark.parametrize(
    ("config", "architecture", "reason"),
    [
        (Gemma2Config(**SHAPE, head_dim=16), "Gemma2ForCausalLM", "its attention has 'softcap'"),
        (
            GptOssConfig(**SHAPE, head_dim=16, num_local_experts=4),
            "GptOssForCausalLM",
            "its attention has 's_aux'",
        ),
        (Llama4TextConfig(**SHAPE, head_dim=16), "Llama4ForCausalLM", "neither causal nor a sliding window"),
        (Qwen3NextConfig(**SHAPE), "Qwen3NextForCausalLM", "not all attend once"),
        (BloomConfig(vocab_size=97, hidden_size=48, n_layer=2, n_head=4), "BloomForCausalLM", "'max_position"),
        (MambaConfig(vocab_size=97, hidden_size=48), "MambaForCausalLM", "'max_position_embeddings'"),
        (Phi3Config(**SHAPE, rope_parameters=LONGROPE), "Phi3ForCausalLM", "'longrope' is not supported"),
        (FALLBACK_FAMILIES["gpt2"], "GPT2Strange", "GPT2Strange is not supported"),
        (FALLBACK_FAMILIES["gpt2"], "GraniteForCausalLM", "has no such decoder"),
    ],
)  # fmt: skip
def test_what_paged_attention_cannot_give_exactly_is_refused_in_one_sentence(
    config: PreTrainedConfig, architecture: str, reason: str
) -> None:
    with pytest.raises(ModelError, match=reason) as caught:
        spec_of(config, architecture)
    assert "\n" not in str(caught.value)


def test_a_model_with_another_memory_than_attentions_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    mamba = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16}
    save_tiny(FalconH1Config(**SHAPE, **mamba, time_step_limit=(0.0, 9.0)), tmp_path)
    with pytest.raises(ModelError, match="its tokens reach each other in other ways than attention"):
        Driver(str(tmp_path))


def test_a_model_that_counts_positions_itself_is_refused_when_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(FALLBACK_FAMILIES["granite"], tmp_path)
    forward = GraniteModel.forward
    monkeypatch.setattr(GraniteModel, "forward", lambda self, position_ids, **more: forward(self, **more))
    with pytest.raises(ModelError, match="does not take their positions as given"):
        Driver(str(tmp_path))


def test_a_configuration_that_transformers_refuses_is_refused() -> None:
    with pytest.raises(ModelError, match=r"a configuration that transformers refuses: .*vocab_size"):
        spec_of(FALLBACK_FAMILIES["gpt2"], "GPT2LMHeadModel", vocab_size="many")


def test_quantized_checkpoints_and_our_own_quantization_are_refused() -> None:
    with pytest.raises(ModelError, match="Quantized checkpoints"):
        spec_of(FALLBACK_FAMILIES["gpt2"], "GPT2LMHeadModel", quantization_config={"quant_method": "gptq"})
    for quantization in ("int8", "fp8"):
        with pytest.raises(ModelError, match=f"{quantization}.* is not supported for GPT2"):
            stored(spec_of(FALLBACK_FAMILIES["gpt2"], "GPT2LMHeadModel"), quantization)


def test_without_transformers_the_extra_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"pip install 'tidegate\[transformers\]'"):
        spec_of(FALLBACK_FAMILIES["gpt2"], "GPT2LMHeadModel")
