"""From a checkpoint's own description of itself to a ``ModelSpec``: Hugging Face's config.json and GGUF metadata."""

import math
from collections.abc import Mapping
from typing import Any

from tidegate.base.errors import ModelError
from tidegate.base.specs import ExpertsSpec, LatentSpec, ModelSpec, RopeScaling
from tidegate.models.fp8_checkpoint import fp8_checkpoint

SUPPORTED_ARCHITECTURES = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)

Config = Mapping[str, Any]


def spec_from_hf(config: Config, generation: Config | None = None) -> ModelSpec:
    """The spec that a Hugging Face ``config.json`` describes.

    ``generation`` is the content of ``generation_config.json``: its end-of-sequence ids count too.
    Keys that are left out take transformers' defaults, but ``num_key_value_heads`` that of ``num_attention_heads``.
    Raises ModelError for what can't be computed faithfully.
    """
    architecture = _architecture(config)
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"Activation {config['hidden_act']!r} is not supported by {architecture}; only 'silu' is.")
    hidden, heads = int(_need(config, "hidden_size")), int(_need(config, "num_attention_heads"))
    default_head_dim = 128 if architecture == "Qwen3ForCausalLM" else hidden // heads
    trained_len = int(_need(config, "max_position_embeddings"))
    theta, scaling = _hf_rope(config, trained_len)
    llama, qwen2, qwen3, deepseek = (architecture.startswith(n) for n in ("Llama", "Qwen2", "Qwen3", "Deepseek"))
    attention_bias = bool(config.get("attention_bias", False)) and (llama or qwen3 or deepseek)
    latent = _hf_latent(config, architecture) if deepseek else None
    return ModelSpec(
        architecture=architecture,
        num_layers=int(_need(config, "num_hidden_layers")),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=1 if latent else int(config.get("num_key_value_heads") or heads),
        head_dim=latent.rank + latent.rope_dim if latent else int(config.get("head_dim") or default_head_dim),
        ffn_size=int(_need(config, "intermediate_size")),
        vocab_size=int(_need(config, "vocab_size")),
        max_len=_usable_len(trained_len, scaling),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=(qwen2 and bool(config.get("qkv_bias", True))) or attention_bias,
        qk_norm=qwen3,
        attn_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and llama,
        sliding_window=_hf_sliding_window(config, architecture),
        eos_ids=token_ids(config.get("eos_token_id"), (generation or {}).get("eos_token_id")),
        bos_id=next(iter(token_ids(config.get("bos_token_id"))), None),
        experts=_hf_experts(config, architecture),
        latent=latent,
        fp8=fp8_checkpoint(config["quantization_config"]) if config.get("quantization_config") else None,
    )


def _architecture(config: Config) -> str:
    names = config.get("architectures") or ["none"]
    for name in names:
        if name in SUPPORTED_ARCHITECTURES:
            return str(name)
    raise ModelError(f"Architecture {names[0]} is not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}.")


def _need(config: Config, key: str) -> Any:
    if config.get(key) is None:
        raise ModelError(f"The model's config.json has no {key!r}.")
    return config[key]


def token_ids(*values: int | list[int] | None) -> tuple[int, ...]:
    """All ids named, each once, in order. Configurations write one id, a list of ids, or null."""
    flat = [i for v in values if v is not None for i in (v if isinstance(v, list) else [v])]
    return tuple(dict.fromkeys(int(i) for i in flat))


def _hf_rope(config: Config, trained_len: int) -> tuple[float, RopeScaling]:
    """Base and scaling, from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before)."""
    rope: Config = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if (rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError("Rotary embedding of a part of each head (partial_rotary_factor) is not supported.")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    original = int(config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or 0)
    if kind == "default":
        return theta, RopeScaling()
    if kind not in ("linear", "llama3", "yarn"):
        raise ModelError(
            f"RoPE scaling {kind!r} is not supported; supported are 'default', 'linear', 'llama3' and 'yarn'."
        )
    original = original or trained_len
    factor = float(rope["factor"]) if rope.get("factor") else trained_len / original
    if kind == "linear":
        return theta, RopeScaling("linear", factor)
    if kind == "llama3":
        low, high = float(rope.get("low_freq_factor", 1.0)), float(rope.get("high_freq_factor", 4.0))
        return theta, RopeScaling("llama3", factor, low, high, original)
    if not rope.get("truncate", True):
        raise ModelError("YaRN without truncation ('truncate': false) is not supported.")
    return theta, RopeScaling(
        "yarn",
        factor,
        original_max_len=original,
        attention_factor=_yarn_attention_factor(rope, factor),
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
    )


def _yarn_attention_factor(rope: Config, factor: float) -> float:
    """YaRN, section 3.4: sqrt(1/t) = 0.1 ln(s) + 1, or the ratio of two such terms where the model gives both."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return _yarn_magnitude(factor, float(mscale)) / _yarn_magnitude(factor, float(mscale_all_dim))
    return _yarn_magnitude(factor, 1.0)


def _yarn_magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _usable_len(trained_len: int, scaling: RopeScaling) -> int:
    """YaRN configurations often leave the length before extension in ``max_position_embeddings``."""
    return max(trained_len, int(scaling.original_max_len * scaling.factor)) if scaling.kind == "yarn" else trained_len


def _hf_sliding_window(config: Config, architecture: str) -> int | None:
    window: int | None = config.get("sliding_window", None if architecture == "MixtralForCausalLM" else 4096)
    if architecture in ("MistralForCausalLM", "MixtralForCausalLM"):
        return window
    if not architecture.startswith("Qwen") or not config.get("use_sliding_window", False):
        return None
    if architecture == "Qwen3MoeForCausalLM":
        return window
    layers, edge = int(config["num_hidden_layers"]), int(config.get("max_window_layers", 28))
    moe = architecture == "Qwen2MoeForCausalLM"
    windowed_by_default = [(i < edge and i % 2 == 0) if moe else i >= edge for i in range(layers)]
    kinds = config.get("layer_types") or [
        "sliding_attention" if is_windowed else "" for is_windowed in windowed_by_default
    ]
    windowed = sum(kind == "sliding_attention" for kind in kinds[:layers])
    if window is None or windowed == 0:
        return None
    if windowed < layers:
        raise ModelError(
            f"{windowed} of {layers} layers use a sliding window; only models where all or none do are supported."
        )
    return window


def _hf_experts(config: Config, architecture: str) -> ExpertsSpec | None:
    if architecture == "MixtralForCausalLM":
        experts, per_token = int(_need(config, "num_local_experts")), int(_need(config, "num_experts_per_tok"))
        return ExpertsSpec(experts, per_token, int(_need(config, "intermediate_size")), normalised=True)
    if architecture.startswith("Deepseek"):
        return _deepseek_experts(config, architecture)
    if "Moe" not in architecture:
        return None
    step, dense = int(config.get("decoder_sparse_step") or 1), config.get("mlp_only_layers") or ()
    layers, shared = range(int(_need(config, "num_hidden_layers"))), "Qwen2" in architecture
    return ExpertsSpec(
        num_experts=int(config.get("num_experts") or _need(config, "num_local_experts")),
        per_token=int(_need(config, "num_experts_per_tok")),
        ffn_size=int(_need(config, "moe_intermediate_size")),
        normalised=bool(config.get("norm_topk_prob", False)),
        shared_ffn_size=int(_need(config, "shared_expert_intermediate_size")) if shared else 0,
        shared_gated=shared,
        dense_layers=tuple(i for i in layers if i in dense or (i + 1) % step != 0),
    )


def _deepseek_experts(config: Config, architecture: str) -> ExpertsSpec:
    v3 = architecture == "DeepseekV3ForCausalLM"
    method = config.get("topk_method", "noaux_tc" if v3 else "greedy")
    if method not in (("noaux_tc",) if v3 else ("greedy", "group_limited_greedy")):
        raise ModelError(f"Choosing experts by {method!r} is not supported for {architecture}.")
    if config.get("mlp_bias", False):
        raise ModelError(f"Biases in the MLPs of {architecture} are not supported.")
    ffn, grouped = int(_need(config, "moe_intermediate_size")), method != "greedy"
    return ExpertsSpec(
        num_experts=int(config.get("n_routed_experts") or _need(config, "num_local_experts")),
        per_token=int(_need(config, "num_experts_per_tok")),
        ffn_size=ffn,
        normalised=v3 and bool(config.get("norm_topk_prob", True)),
        shared_ffn_size=int(_need(config, "n_shared_experts")) * ffn,
        dense_layers=tuple(range(int(_need(config, "first_k_dense_replace")))),
        scores="sigmoid" if v3 else "softmax",
        groups=int(config.get("n_group") or 1) if grouped else 1,
        groups_per_token=int(config.get("topk_group") or 1) if grouped else 1,
        scale=float(_need(config, "routed_scaling_factor")),
        exact_router=True,
    )


def _hf_latent(config: Config, architecture: str) -> LatentSpec:
    nope, rope = int(_need(config, "qk_nope_head_dim")), int(_need(config, "qk_rope_head_dim"))
    scaling: Config = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind, all_dim = scaling.get("rope_type") or scaling.get("type") or "default", scaling.get("mscale_all_dim")
    magnitude = _yarn_magnitude(float(scaling["factor"]), float(all_dim)) if kind != "default" and all_dim else 1.0
    query_rank = config.get("q_lora_rank")
    return LatentSpec(
        rank=int(_need(config, "kv_lora_rank")),
        nope_dim=nope,
        rope_dim=rope,
        value_dim=int(_need(config, "v_head_dim")),
        query_rank=int(query_rank) if query_rank is not None else None,
        scale=(nope + rope) ** -0.5 * magnitude**2,
        rope_pairs=architecture == "DeepseekV2ForCausalLM" or bool(config.get("rope_interleave", True)),
    )
