"""Weights from a Hugging Face directory: config.json and one or several safetensors files."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch

from tidegate.base.errors import ModelError
from tidegate.base.specs import ModelSpec, Shard
from tidegate.kernels.fp8 import E4M3
from tidegate.models.fp8_weights import read_scales
from tidegate.models.shards import Cut
from tidegate.models.weights import WHOLE, fill

_TOP = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "lm_head": "lm_head.weight"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_a": "self_attn.q_a_proj",
    "q_a_norm": "self_attn.q_a_layernorm",
    "q_b": "self_attn.q_b_proj",
    "kv_a": "self_attn.kv_a_proj_with_mqa",
    "kv_a_norm": "self_attn.kv_a_layernorm",
    "kv_b": "self_attn.kv_b_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "router": "mlp.gate",
    "shared_router": "mlp.shared_expert_gate",
    "shared.gate": "mlp.shared_expert.gate_proj",
    "shared.up": "mlp.shared_expert.up_proj",
    "shared.down": "mlp.shared_expert.down_proj",
}
_EXPERTS = "mlp.experts.{}.{}_proj"
_MIXTRAL_EXPERTS = "block_sparse_moe.experts.{}.{}"
_MIXTRAL_IN_EXPERT = {"gate": "w1", "up": "w3", "down": "w2"}
_DEEPSEEK = {f"shared.{name}": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")}
_OF_FAMILY = {
    "MixtralForCausalLM": {"router": "block_sparse_moe.gate"},
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
}


class SafetensorsSource:
    """See ``models.sources.ModelSource``."""

    def __init__(self, folder: Path, spec: ModelSpec, tokenizer_dir: Path | None) -> None:
        self.spec = spec
        self.tokenizer_dir = tokenizer_dir
        self.gguf_file: Path | None = None
        self._folder = folder
        self._files = weight_files(folder)

    def load(self, into: Mapping[str, torch.Tensor], progress: Callable[[float], None], shard: Shard = WHOLE) -> None:
        where = open_tensors(self._folder, self._files)

        def read(part: str, out: torch.Tensor, cut: Cut) -> None:
            copy_tensor(where, hf_name(part, self.spec.architecture), out, cut, self._folder)
            latent, name = self.spec.latent, part.rpartition(".")[2].removesuffix("_bias")
            if latent is not None and latent.rope_pairs and name in ("q", "q_b", "kv_a"):
                heads = 1 if name == "kv_a" else len(out) // (latent.nope_dim + latent.rope_dim)
                _pairs_to_halves(out, heads, latent.rope_dim)

        fill(self.spec, into, read, progress, shard)
        if self.spec.fp8 is not None:
            read_scales(self.spec, into, lambda name: where[name].get_tensor(name) if name in where else None)


def open_tensors(folder: Path, files: list[Path]) -> dict[str, Any]:
    """The open file of every tensor's name. Files are mapped, not read: a tensor's pages are touched once, when it is
    copied to its place."""
    try:
        opened: list[Any] = [safetensors.safe_open(file, framework="pt") for file in files]
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelError(f"Can't read the weights in {folder}: {error}.") from error
    return {name: file for file in opened for name in file.keys()}  # noqa: SIM118 (not a mapping)


def copy_tensor(where: Mapping[str, Any], name: str, out: torch.Tensor, cut: Cut, folder: Path) -> None:
    """Copies a cut of a tensor; pages of the file that it does not touch are not read."""
    if name not in where:
        raise ModelError(f"The weights in {folder} have no tensor {name!r}.")
    tensor: torch.Tensor = where[name].get_tensor(name)
    if tuple(tensor.shape) != cut.shape:
        raise ModelError(f"Tensor {name!r} in {folder} is {tuple(tensor.shape)}; expected {cut.shape}.")
    if E4M3 in (tensor.dtype, out.dtype) and tensor.dtype != out.dtype:
        raise ModelError(f"Tensor {name!r} in {folder} is {tensor.dtype}; by its configuration it is {out.dtype}.")
    out.copy_(tensor if cut.whole else tensor.narrow(cut.axis, cut.start, cut.stop - cut.start))


def hf_name(part: str, architecture: str) -> str:
    """The name in a Hugging Face checkpoint of a part as named by ``models.weights.parts``."""
    if part in _TOP:
        return _TOP[part]
    _, index, name = part.split(".", 2)
    if name.startswith("experts."):
        _, expert, name = name.split(".")
        mixtral = architecture == "MixtralForCausalLM"
        inner = _MIXTRAL_EXPERTS.format(expert, _MIXTRAL_IN_EXPERT[name]) if mixtral else _EXPERTS.format(expert, name)
        return f"model.layers.{index}.{inner}.weight"
    if name == "correction":
        return f"model.layers.{index}.mlp.gate.e_score_correction_bias"
    stem = name.removesuffix("_bias")
    inner = _OF_FAMILY.get(architecture, {}).get(stem, _IN_LAYER[stem])
    return f"model.layers.{index}.{inner}.{'weight' if stem == name else 'bias'}"


def _pairs_to_halves(rows: torch.Tensor, heads: int, turned: int) -> None:
    """Reorders, in place, the last ``turned`` of each head's rows: pairs of neighbours become pairs of halves."""
    of_heads = rows.view(heads, -1, *rows.shape[1:])[:, -turned:]
    of_heads.copy_(torch.cat((of_heads[:, 0::2], of_heads[:, 1::2]), dim=1))


def weight_files(folder: Path) -> list[Path]:
    """The shards that the index names, or model.safetensors, or whatever safetensors there are."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        names = json.loads(index.read_text())["weight_map"].values()
        files = [folder / name for name in sorted(set(names))]
    else:
        files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise ModelError(f"{folder} lacks {', '.join(missing)}, which its index names.")
    if not files:
        raise ModelError(f"{folder} holds no *.safetensors files (other weight formats are not supported).")
    return files
