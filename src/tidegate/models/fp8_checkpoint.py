"""What a Hugging Face checkpoint's ``quantization_config`` says of matrices kept in FP8: the formats "fp8" (AutoFP8,
vLLM) and "compressed-tensors" (llm-compressor). https://github.com/vllm-project/compressed-tensors"""

import re
from collections.abc import Mapping
from typing import Any

from tidegate.base.errors import ModelError
from tidegate.base.specs import Fp8Checkpoint

Config = Mapping[str, Any]


def fp8_checkpoint(config: Config) -> Fp8Checkpoint:
    """Raises ModelError for every other kind of quantised checkpoint."""
    method = config.get("quant_method")
    if method == "fp8":
        return _plain(config)
    if method == "compressed-tensors":
        return _compressed(config)
    raise ModelError(
        f"Quantized Hugging Face checkpoints of kind {method!r} are not supported, only those in FP8: use the "
        f"unquantized model or a GGUF file."
    )


def is_kept(module: str, checkpoint: Fp8Checkpoint) -> bool:
    """Whether the checkpoint left a module ("model.layers.0.mlp.down_proj") in the type it had."""
    return any(_names(pattern, module) for pattern in checkpoint.kept)


def _names(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return f".{pattern}." in f".{module}."


def _plain(config: Config) -> Fp8Checkpoint:
    if config.get("weight_block_size"):
        raise ModelError("FP8 checkpoints with a scale for each block of a matrix are not supported.")
    kept = config.get("ignored_layers") or config.get("modules_to_not_convert") or ()
    return Fp8Checkpoint(static_inputs=config.get("activation_scheme") == "static", kept=tuple(kept))


def _compressed(config: Config) -> Fp8Checkpoint:
    groups = list((config.get("config_groups") or {}).values())
    if len(groups) != 1 or list(groups[0].get("targets") or ()) != ["Linear"]:
        raise ModelError("Compressed checkpoints are supported where all linear layers are compressed alike, only.")
    weights, inputs = groups[0].get("weights") or {}, groups[0].get("input_activations") or {}
    strategy = weights.get("strategy")
    if not (_is_e4m3(weights) and _is_e4m3(inputs)) or strategy not in ("tensor", "channel"):
        raise ModelError(
            f"Compressed checkpoints are supported in FP8 with a scale for each tensor or row, only, not with weights "
            f"of {weights.get('num_bits')} bits ({weights.get('type')}) and a scale for each {strategy}."
        )
    static = not inputs.get("dynamic", False)
    if static and inputs.get("strategy") != "tensor":
        raise ModelError("Scales of inputs that are fixed are supported for whole tensors, only.")
    return Fp8Checkpoint(static_inputs=static, kept=tuple(config.get("ignore") or ()))


def _is_e4m3(numbers: Config) -> bool:
    return numbers.get("num_bits") == 8 and numbers.get("type") == "float" and bool(numbers.get("symmetric", True))
