"""GGUF files: metadata, tensor order, quantisation; SmolLM2 against transformers reading the same file."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_reference import transformers_model
from tiny_models import FAMILIES, Driver, prompt, reference_logits, save_tiny
from transformers import PreTrainedModel

from tidegate.base.errors import ModelError
from tidegate.models.demo import demo_model_path
from tidegate.models.gguf_file import GgufFile
from tidegate.models.sources import open_model

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Hugging Face's order of a head's rows (two halves) to llama.cpp's (pairs)."""
    per_head = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(per_head.swapaxes(1, 2)).reshape(rows.shape)


def write_gguf(
    model: PreTrainedModel,
    file: Path,
    arch: str,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    skip: tuple[str, ...] = (),
) -> str:
    """``model`` as llama.cpp's converter would write it; matrices whose rows allow it are quantised to ``kind``."""
    config = model.config
    writer = gguf.GGUFWriter(file, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_token_list([f"token {i} é" for i in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_eos_token_id(5)
    writer.add_eot_token_id(6)
    writer.add_bos_token_id(4)
    for key, value in (metadata or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, weight in model.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        target = next(ours for theirs, ours in NAMES.items() if stem.endswith(theirs))
        if stem.startswith("model.layers."):
            target = f"blk.{stem.split('.')[2]}.{target}"
        if f"{target}.{suffix}" in skip or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        data = weight.float().numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            data = interleaved(data, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        if data.ndim == 2 and data.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0:
            writer.add_tensor(f"{target}.{suffix}", gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{target}.{suffix}", data)
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(file)


@pytest.mark.parametrize(
    ("family", "arch"),
    [
        ("llama", "llama"),
        ("llama tied, one KV head", "llama"),
        ("llama, all heads KV heads, biases", "llama"),
        ("llama, wide heads", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
    ],
)
def test_a_gguf_file_gives_the_logits_of_the_model_it_was_made_from(tmp_path: Path, family: str, arch: str) -> None:
    reference = save_tiny(FAMILIES[family], tmp_path / "hf")
    tokens = prompt(20)
    ours = Driver(write_gguf(reference, tmp_path / "m.gguf", arch)).feed(0, tokens, 7)
    torch.testing.assert_close(ours, reference_logits(reference, tokens), rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_quantised_matrices_are_read_as_the_gguf_library_reads_them(tmp_path: Path, kind: str) -> None:
    config = type(FAMILIES["llama"])(
        **{**FAMILIES["llama"].to_dict(), "hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
    )
    reference = save_tiny(config, tmp_path / "hf")
    quantisation = gguf.GGMLQuantizationType[kind]
    path = write_gguf(reference, tmp_path / "m.gguf", "llama", quantisation)
    with torch.no_grad():
        for weight in reference.parameters():
            if weight.dim() == 2:
                values = gguf.dequantize(gguf.quantize(weight.numpy(), quantisation), quantisation)
                weight.copy_(torch.from_numpy(values.copy()))
    tokens = prompt(12)
    torch.testing.assert_close(
        Driver(path).feed(0, tokens, 12), reference_logits(reference, tokens), rtol=0.0, atol=1e-4
    )


def test_linear_and_yarn_rope_are_read_from_metadata(tmp_path: Path) -> None:
    for family, arch, metadata in (
        ("llama linear rope", "llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 3.0}),
        (
            "qwen2 tied, yarn rope",
            "qwen2",
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64,
                "rope.scaling.yarn_beta_fast": 2.0,
                "rope.scaling.yarn_beta_slow": 0.5,
            },
        ),
    ):
        reference = save_tiny(FAMILIES[family], tmp_path / arch)
        keys = {f"{arch}.{key}": value for key, value in metadata.items()}
        path = write_gguf(reference, tmp_path / f"{arch}.gguf", arch, metadata=keys)
        tokens = prompt(40)
        ours = Driver(path).feed(0, tokens, 40)
        torch.testing.assert_close(ours, reference_logits(reference, tokens), rtol=0.0, atol=1e-4)


def llama3_divisors(factor: float, head_dim: int, theta: float) -> np.ndarray:
    """As llama.cpp's converter computes ``rope_freqs.weight`` for Llama 3.1 and later."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1.0) / 3.0
            divisors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)


def test_llama_3_rope_is_recognised_by_its_divisors(tmp_path: Path) -> None:
    model = save_tiny(FAMILIES["llama, wide heads"], tmp_path / "hf")
    good = {"rope_freqs.weight": llama3_divisors(32.0, 20, 10000.0)}
    scaling = open_model(write_gguf(model, tmp_path / "good.gguf", "llama", tensors=good)).spec.rope_scaling
    assert (scaling.kind, scaling.factor, scaling.original_max_len) == ("llama3", 32.0, 8192)
    assert (scaling.low_freq_factor, scaling.high_freq_factor) == (1.0, 4.0)
    bad = {"rope_freqs.weight": good["rope_freqs.weight"][::-1].copy()}
    with pytest.raises(ModelError, match="rope_freqs"):
        open_model(write_gguf(model, tmp_path / "bad.gguf", "llama", tensors=bad))


def test_end_and_begin_ids_come_from_the_metadata(tmp_path: Path) -> None:
    model = save_tiny(FAMILIES["llama"], tmp_path / "hf")
    source = open_model(write_gguf(model, tmp_path / "m.gguf", "llama"))
    assert source.spec.eos_ids == (5, 6)
    assert source.spec.bos_id == 4
    assert source.gguf_file == tmp_path / "m.gguf"
    assert source.tokenizer_dir is None


def test_what_cannot_be_run_is_refused_with_its_reason(tmp_path: Path) -> None:
    model = save_tiny(FAMILIES["llama"], tmp_path / "hf")
    for metadata, reason in (
        ({"llama.expert_count": 8}, "Mixture-of-experts"),
        ({"llama.rope.dimension_count": 6}, "rotary"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope' is not supported"),
    ):
        with pytest.raises(ModelError, match=reason):
            open_model(write_gguf(model, tmp_path / "m.gguf", "llama", metadata=metadata))
    with pytest.raises(ModelError, match="'gemma3' is not supported; supported are 'llama', 'qwen2', 'qwen3'"):
        open_model(write_gguf(model, tmp_path / "m.gguf", "gemma3"))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    model = save_tiny(FAMILIES["qwen3"], tmp_path / "hf")
    path = write_gguf(model, tmp_path / "m.gguf", "qwen3", skip=("blk.1.ffn_up.weight",))
    with pytest.raises(ModelError, match=r"no tensor 'blk\.1\.ffn_up\.weight'"):
        Driver(path)


def test_a_damaged_file_is_a_model_error(tmp_path: Path) -> None:
    model = save_tiny(FAMILIES["llama"], tmp_path / "hf")
    whole = Path(write_gguf(model, tmp_path / "m.gguf", "llama")).read_bytes()
    damaged = tmp_path / "damaged.gguf"
    for content in (b"", b"GGUF", b"GGML" + whole[4:], whole[:200], whole[: len(whole) // 2]):
        damaged.write_bytes(content)
        with pytest.raises(ModelError, match="not a readable GGUF file"):
            open_model(str(damaged))


@pytest.fixture(scope="module")
def smollm2() -> Path:
    try:
        return demo_model_path()
    except ModelError as error:
        pytest.skip(str(error))


def test_the_header_agrees_with_the_gguf_library(smollm2: Path) -> None:
    ours, theirs = GgufFile(smollm2), gguf.GGUFReader(smollm2)
    assert {t.name: tuple(reversed(t.shape.tolist())) for t in theirs.tensors} == {
        name: tensor.shape for name, tensor in ours.tensors.items()
    }
    for tensor in theirs.tensors:
        assert ours.tensors[tensor.name].kind == tensor.tensor_type
        assert ours.tensors[tensor.name].data.tobytes() == tensor.data.tobytes()
    for key, value in ours.metadata.items():
        assert theirs.get_field(key).contents() == value


def test_smollm2s_logits_are_transformers(smollm2: Path) -> None:
    reference = transformers_model(smollm2)
    tokens = prompt(150, vocab=reference.config.vocab_size)
    expected = reference_logits(reference, tokens)
    driver = Driver(str(smollm2), slots=2, max_len=200, blocks="two runs")
    ours = torch.cat((driver.feed(0, tokens[:140], 61), driver.feed(0, tokens[140:], 1)))
    torch.testing.assert_close(ours, expected, rtol=0.0, atol=2e-4)
    best = expected.topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 1e-3, "no near ties here: greedy tokens must agree everywhere"
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))
