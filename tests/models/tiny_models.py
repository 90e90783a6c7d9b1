"""Tiny random models of every family, made and saved by transformers, and a driver for ours."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    ApertusConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto import AutoModelForCausalLM

from tidegate.base.specs import ModelSpec, PoolSpec
from tidegate.device.pool import Pool
from tidegate.kernels.attention import AttentionRows
from tidegate.kernels.choose_attention import attention_over
from tidegate.kernels.collectives import Collectives
from tidegate.kernels.torch_attention import TorchAttention
from tidegate.kernels.windows import Backend
from tidegate.models.linears import load, stored
from tidegate.models.registry import build_model
from tidegate.models.sources import open_model

BLOCK_SIZE = 4
VOCAB = 97

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,  # with these, some of a head's few frequencies are kept, some blended, some interpolated
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
}
_YARN_MSCALE = {**_YARN, "mscale": 0.9, "mscale_all_dim": 0.4}
_LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}
_WINDOWED = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}

_EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
_DEEPSEEK: dict[str, Any] = {
    **_SHAPE, "num_key_value_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
}  # fmt: skip
_YARN_MLA = {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.7}

FAMILIES = {
    "llama": LlamaConfig(**_SHAPE),
    "llama tied, one KV head": LlamaConfig(**{**_SHAPE, "num_key_value_heads": 1}, tie_word_embeddings=True),
    "llama, all heads KV heads, biases": LlamaConfig(
        **{**_SHAPE, "num_key_value_heads": 4}, attention_bias=True, mlp_bias=True
    ),
    "llama, wide heads": LlamaConfig(**_SHAPE, head_dim=20),
    "llama 3.1 rope": LlamaConfig(**_SHAPE, rope_parameters=_LLAMA3),
    "llama linear rope": LlamaConfig(**_SHAPE, rope_parameters=_LINEAR),
    "llama yarn rope with mscale": LlamaConfig(**_SHAPE, rope_parameters=_YARN_MSCALE),
    "mistral": MistralConfig(**_SHAPE, sliding_window=None),
    "mistral, window": MistralConfig(**_SHAPE, sliding_window=7),
    "qwen2": Qwen2Config(**_SHAPE),
    "qwen2 tied, yarn rope": Qwen2Config(**_SHAPE, tie_word_embeddings=True, rope_parameters=_YARN),
    "qwen2, window": Qwen2Config(**_SHAPE, **_WINDOWED),
    "qwen3": Qwen3Config(**_SHAPE, head_dim=16),
    "qwen3 tied, biases, window": Qwen3Config(
        **_SHAPE, head_dim=24, attention_bias=True, tie_word_embeddings=True, **_WINDOWED
    ),
    "mixtral": MixtralConfig(**_SHAPE, num_local_experts=5, num_experts_per_tok=2),
    "mixtral, window": MixtralConfig(**_SHAPE, num_local_experts=3, num_experts_per_tok=1, sliding_window=7),
    "qwen2 moe": Qwen2MoeConfig(**_SHAPE, **_EXPERTS, shared_expert_intermediate_size=56),
    "qwen2 moe, no biases, every other layer": Qwen2MoeConfig(
        **_SHAPE, **_EXPERTS, shared_expert_intermediate_size=56, qkv_bias=False, decoder_sparse_step=2
    ),
    "qwen3 moe": Qwen3MoeConfig(**_SHAPE, **_EXPERTS, head_dim=16),
    "qwen3 moe, shares normalised, biases, a dense layer, window": Qwen3MoeConfig(
        **_SHAPE, **_EXPERTS, norm_topk_prob=True, attention_bias=True, mlp_only_layers=[1], use_sliding_window=True,
        sliding_window=5,
    ),
    "deepseek v2, lite": DeepseekV2Config(**_DEEPSEEK, q_lora_rank=None, n_shared_experts=2, head_dim=8),
    "deepseek v2, groups, biases, yarn with mscale": DeepseekV2Config(
        **_DEEPSEEK, q_lora_rank=20, topk_method="group_limited_greedy", n_group=4, topk_group=2, attention_bias=True,
        routed_scaling_factor=1.7, rope_parameters=_YARN_MLA,
    ),
    "deepseek v3": DeepseekV3Config(**_DEEPSEEK, q_lora_rank=20, n_group=4, topk_group=2, n_shared_experts=1),
    "deepseek v3, no query rank, not normalised, halves, yarn": DeepseekV3Config(
        **_DEEPSEEK, q_lora_rank=None, n_group=1, topk_group=1, norm_topk_prob=False, rope_interleave=False,
        rope_parameters={**_YARN_MLA, "mscale": 0.9},
    ),
}  # fmt: skip
_MIXED_WINDOWS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 6}
_IN_VOCAB: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

# Those that transformers' own modules compute: learned positions; rotary positions of a part of a head, and attention
# beside the MLP; windows that differ from layer to layer; scaled attention and logits; fused projections and a window;
# experts that lie otherwise in a checkpoint than in the modules; numbers as weights; a decoder in a decoder.
FALLBACK_FAMILIES = {
    "gpt2": GPT2Config(vocab_size=VOCAB, n_embd=48, n_layer=3, n_head=4, n_positions=128, **_IN_VOCAB),
    "gpt neox": GPTNeoXConfig(**{**_SHAPE, "hidden_size": 64, "num_key_value_heads": None}, **_IN_VOCAB),
    "gemma3": Gemma3TextConfig(**_SHAPE, head_dim=16, query_pre_attn_scalar=20, **_MIXED_WINDOWS, **_IN_VOCAB),
    "granite": GraniteConfig(
        **_SHAPE, attention_multiplier=0.3, embedding_multiplier=3.0, residual_multiplier=0.6, logits_scaling=2.0
    ),
    "phi3": Phi3Config(**_SHAPE, sliding_window=7, **_IN_VOCAB),
    "apertus": ApertusConfig(**_SHAPE, **_IN_VOCAB),
    "opt": OPTConfig(
        vocab_size=VOCAB, hidden_size=48, ffn_dim=80, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=128, word_embed_proj_dim=48, **_IN_VOCAB,
    ),
    "olmoe": OlmoeConfig(**_SHAPE, num_experts=6, num_experts_per_tok=3, **_IN_VOCAB),
}  # fmt: skip


def empty_weights(spec: ModelSpec, quantization: str | None = None) -> dict[str, torch.Tensor]:
    """What a model is loaded into, full of values that show when they are not overwritten."""
    found = {}
    for name, (dtype, shape) in stored(spec, quantization).items():
        kind = getattr(torch, dtype)
        found[name] = torch.full(shape, -128 if kind == torch.int8 else torch.nan, dtype=torch.float32).to(kind)
    return found


def save_tiny(config: Any, folder: Path, **save_options: Any) -> PreTrainedModel:
    """A float32 model with every weight random (biases and norms too), saved as safetensors in ``folder``."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_norm = name.endswith("weight") and ("norm" in name or "ln_" in name)
            weight.normal_(1.0 if is_norm else 0.0, 0.2)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.normal_(0.0, 0.2)
    model.save_pretrained(folder, **save_options)
    return model


def reference_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """``[len(tokens), vocab]`` by transformers."""
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float()


def prompt(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Driver:
    """Our model over a pool of its own; slot s may hold up to ``max_len`` tokens.

    ``blocks``: a slot's in memory are "ascending", "descending", or "two runs".
    """

    def __init__(
        self,
        path: str,
        slots: int = 4,
        max_len: int = 64,
        blocks: str = "ascending",
        quantization: str | None = None,
        backend: Backend = TorchAttention,
    ) -> None:
        source = open_model(path)
        spec, weights = source.spec, empty_weights(source.spec, quantization)
        load(source, weights)
        self._set_up(spec, weights, slots, max_len, blocks, backend)

    @classmethod
    def over(
        cls, spec: ModelSpec, weights: dict[str, torch.Tensor], collectives: Collectives | None = None
    ) -> "Driver":
        """Over weights that have been loaded already."""
        driver = cls.__new__(cls)
        driver._set_up(spec, weights, 4, 64, "ascending", TorchAttention, collectives)
        return driver

    def _set_up(
        self,
        spec: ModelSpec,
        weights: dict[str, torch.Tensor],
        slots: int,
        max_len: int,
        blocks: str,
        backend: Backend,
        collectives: Collectives | None = None,
    ) -> None:
        per_slot = -(-(max_len + 1) // BLOCK_SIZE)
        pool = Pool.allocate(spec, PoolSpec(slots * per_slot, BLOCK_SIZE, slots, max_len))
        pool.kv.fill_(torch.nan)  # whatever is read before it is written shows
        for slot in range(slots):
            row = torch.arange(slot * per_slot, (slot + 1) * per_slot, dtype=torch.int32)
            if blocks == "descending":
                row = row.flip(0)
            elif blocks == "two runs":
                row = row.roll(per_slot // 3)
            pool.table[slot, :per_slot] = row
        self._attention = attention_over(backend, spec, pool.kv, pool.table)
        self._model = build_model(spec, weights, self._attention, collectives=collectives)
        self._lengths = [0] * slots

    def step(self, rows: Sequence[tuple[int, list[int]]]) -> list[torch.Tensor]:
        """Feeds each (slot, tokens) row; the logits ``[len(tokens), vocab]`` of each."""
        return list(self.logits(rows, None).split([len(tokens) for _, tokens in rows]))

    def logits(self, rows: Sequence[tuple[int, list[int]]], wanted: list[int] | None) -> torch.Tensor:
        """Feeds each (slot, tokens) row; the logits of the tokens ``wanted``, counted over all rows, or of all."""
        starts = [self._lengths[slot] for slot, _ in rows]
        counts = [len(tokens) for _, tokens in rows]
        flat = torch.tensor([t for _, tokens in rows for t in tokens], dtype=torch.int32)
        positions = torch.cat([torch.arange(s, s + c, dtype=torch.int32) for s, c in zip(starts, counts, strict=True)])
        with torch.inference_mode():
            self._attention.plan(AttentionRows([slot for slot, _ in rows], starts, counts))
            indices = None if wanted is None else torch.tensor(wanted, dtype=torch.int64)
            hidden = self._model.forward(flat, positions, indices)
            logits = self._model.logits(hidden) if len(hidden) else hidden
        for slot, tokens in rows:
            self._lengths[slot] += len(tokens)
        return logits

    def feed(self, slot: int, tokens: list[int], chunk: int) -> torch.Tensor:
        """Feeds one row in chunks; the logits of all its tokens."""
        chunks = [tokens[i : i + chunk] for i in range(0, len(tokens), chunk)]
        return torch.cat([self.step([(slot, part)])[0] for part in chunks])
