"""A model's shape, from wherever its configuration is: nothing else of the model is needed, nor is torch."""

import json
from pathlib import Path
from typing import Any

import msgspec

from tidegate.base.errors import ModelError
from tidegate.base.specs import ExpertsSpec, LatentSpec, ModelSpec
from tidegate.models.config import spec_from_hf
from tidegate.models.hub import snapshot


def _shape(
    kind: str, *sizes: int, head_dim: int = 128, tied: bool = False, experts: ExpertsSpec | None = None
) -> ModelSpec:
    layers, hidden, heads, kv_heads, ffn, vocab, length = sizes
    return ModelSpec(
        f"{kind}ForCausalLM", layers, hidden, heads, kv_heads, head_dim, ffn, vocab, length, tied_embeddings=tied,
        experts=experts,
    )  # fmt: skip


def _deepseek(kind: str, *sizes: int, query_rank: int | None, experts: ExpertsSpec) -> ModelSpec:
    layers, hidden, heads, ffn, vocab, length = sizes
    nope, rope = 128, 64
    latent = LatentSpec(
        512, nope, rope, value_dim=128, query_rank=query_rank, scale=(nope + rope) ** -0.5, rope_pairs=True
    )
    shape = _shape(kind, layers, hidden, heads, 1, ffn, vocab, length, head_dim=latent.rank + rope, experts=experts)
    return msgspec.structs.replace(shape, latent=latent)


KNOWN = {
    "llama-3.2-1b": _shape("Llama", 16, 2048, 32, 8, 8192, 128256, 131072, head_dim=64, tied=True),
    "llama-3.1-8b": _shape("Llama", 32, 4096, 32, 8, 14336, 128256, 131072),
    "llama-3.3-70b": _shape("Llama", 80, 8192, 64, 8, 28672, 128256, 131072),
    "mistral-7b": _shape("Mistral", 32, 4096, 32, 8, 14336, 32768, 32768),
    "qwen2.5-7b": _shape("Qwen2", 28, 3584, 28, 4, 18944, 152064, 32768),
    "qwen2.5-72b": _shape("Qwen2", 80, 8192, 64, 8, 29568, 152064, 32768),
    "qwen3-8b": _shape("Qwen3", 36, 4096, 32, 8, 12288, 151936, 40960),
    "qwen3-32b": _shape("Qwen3", 64, 5120, 64, 8, 25600, 151936, 40960),
    "qwen3-30b-a3b": _shape("Qwen3Moe", 48, 2048, 32, 4, 6144, 151936, 40960, experts=ExpertsSpec(128, 8, 768, True)),
    "mixtral-8x7b": _shape("Mixtral", 32, 4096, 32, 8, 14336, 32000, 32768, experts=ExpertsSpec(8, 2, 14336, True)),
    "deepseek-v2-lite": _deepseek(
        "DeepseekV2", 27, 2048, 16, 10944, 102400, 163840, query_rank=None,
        experts=ExpertsSpec(64, 6, 1408, False, shared_ffn_size=2816, dense_layers=(0,)),
    ),
    "deepseek-v3": _deepseek(
        "DeepseekV3", 61, 7168, 128, 18432, 129280, 163840, query_rank=1536,
        experts=ExpertsSpec(256, 8, 2048, True, shared_ffn_size=2048, dense_layers=(0, 1, 2), scores="sigmoid"),
    ),
    "smollm2": _shape("Llama", 30, 576, 9, 3, 1536, 49152, 8192, head_dim=64, tied=True),
}  # fmt: skip
"""Shapes of well-known models, from their config.json."""


def find_shape(model: str) -> ModelSpec:
    """Of a name in ``KNOWN``, a ``config.json``, a directory with one, a ``.gguf`` file, or a hub id. Raises
    ModelError."""
    if model.lower() in KNOWN:
        return KNOWN[model.lower()]
    place = Path(model).expanduser()
    if place.suffix == ".gguf" and place.exists():
        from tidegate.models.gguf_config import spec_from_gguf
        from tidegate.models.gguf_file import GgufFile

        return spec_from_gguf(GgufFile(place))
    config = place / "config.json" if place.is_dir() else place
    if not config.exists():
        if model.count("/") != 1 or model.startswith((".", "/", "~")) or config.suffix == ".json":
            raise ModelError(
                f"There is no model {model!r}: give a config.json, a directory with one, a .gguf file, a hub id, or "
                f"one of {', '.join(KNOWN)}."
            )
        config = snapshot(model, ["config.json"], lambda cached: (cached / "config.json").exists()) / "config.json"
    return spec_from_hf(_read(config))


def _read(config: Path) -> dict[str, Any]:
    try:
        content = json.loads(config.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"Can't read {config}: {error}.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{config} is not a JSON object.")
    return content
