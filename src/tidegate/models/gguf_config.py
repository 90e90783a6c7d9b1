"""From a GGUF file's metadata to a ``ModelSpec``. Keys: the GGUF specification, "Standardized key-value pairs"."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tidegate.base.errors import ModelError
from tidegate.base.specs import ModelSpec, RopeScaling
from tidegate.models.gguf_file import GgufFile

GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def spec_from_gguf(file: GgufFile) -> ModelSpec:
    """The spec of an open GGUF file. Reads metadata only, and ``rope_freqs.weight`` (a head's size) where present."""
    arch = file.metadata.get("general.architecture")
    if arch not in GGUF_ARCHITECTURES:
        raise ModelError(
            f"GGUF architecture {arch!r} is not supported; supported are {', '.join(map(repr, GGUF_ARCHITECTURES))}."
        )

    def get(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"{arch}.{key}", default)

    def need(key: str) -> Any:
        value = get(key)
        if value is None:
            raise ModelError(f"{file.path} has no single value for '{arch}.{key}'.")
        return value

    if get("expert_count", 0):
        raise ModelError("Mixture-of-experts GGUF files are not supported.")
    tensors = file.tensors
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{file.path} has no tensor 'token_embd.weight'.")
    hidden, heads = int(need("embedding_length")), int(need("attention.head_count"))
    rotary_dim = get("rope.dimension_count")
    head_dim = int(get("attention.key_length") or rotary_dim or hidden // heads)
    if int(get("attention.value_length", head_dim)) != head_dim or int(rotary_dim or head_dim) != head_dim:
        raise ModelError("Heads whose key, value and rotary sizes differ are not supported.")
    theta = float(get("rope.freq_base", 10000.0))
    rope_freqs = tensors.get("rope_freqs.weight")
    context_len = int(need("context_length"))
    scaling = _rope_scaling(get, context_len)
    if rope_freqs is not None and scaling.kind == "none":
        scaling = _llama3_scaling(rope_freqs.data.view(np.float32).ravel(), theta, head_dim)
    eos = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    return ModelSpec(
        architecture=GGUF_ARCHITECTURES[arch],
        num_layers=int(need("block_count")),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=int(get("attention.head_count_kv", heads)),
        head_dim=head_dim,
        ffn_size=int(need("feed_forward_length")),
        vocab_size=int(tensors["token_embd.weight"].shape[0]),
        max_len=context_len,
        norm_eps=float(np.float32(need("attention.layer_norm_rms_epsilon"))),
        rope_theta=theta,
        rope_scaling=scaling,
        tied_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        attn_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        sliding_window=get("attention.sliding_window"),
        eos_ids=tuple(dict.fromkeys(int(i) for i in eos if i is not None)),
        bos_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
    )


def _rope_scaling(get: Callable[..., Any], context_len: int) -> RopeScaling:
    kind = get("rope.scaling.type", "none")
    if kind == "none":
        return RopeScaling()
    factor = float(get("rope.scaling.factor", 1.0))
    if kind == "linear":
        return RopeScaling("linear", factor)
    if kind != "yarn":
        raise ModelError(f"RoPE scaling {kind!r} is not supported in GGUF files; supported are 'linear' and 'yarn'.")
    magnitude = 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
    return RopeScaling(
        "yarn",
        factor,
        original_max_len=int(get("rope.scaling.original_context_length", context_len)),
        attention_factor=magnitude * float(get("rope.scaling.attn_factor", 1.0)),
        beta_fast=float(get("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=float(get("rope.scaling.yarn_beta_slow", 1.0)),
    )


def _llama3_scaling(divisors: npt.NDArray[np.float32], theta: float, head_dim: int) -> RopeScaling:
    """Llama 3.1's scaling from the per-frequency divisors that stand for it in a GGUF file.

    Every released model has low and high factors 1 and 4 over 8192 positions, and the largest divisor is the factor;
    that these give the file's divisors is checked.
    """
    scaling = RopeScaling("llama3", round(float(divisors.max()), 4), 1.0, 4.0, 8192)
    inverse = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = scaling.original_max_len * inverse / (2 * math.pi)
    smooth = np.clip((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / scaling.factor + smooth)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise ModelError("The GGUF file's 'rope_freqs.weight' is not Llama 3's RoPE scaling; no other is supported.")
    return scaling
