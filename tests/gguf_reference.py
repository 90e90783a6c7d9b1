"""A GGUF file as transformers reads it: the reference for ours."""

from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.models.auto import AutoConfig, AutoModelForCausalLM


def transformers_model(file: Path) -> PreTrainedModel:
    """The file as transformers reads it (its ``from_pretrained`` would ask for accelerate, which this does without)."""
    checkpoint = load_gguf_checkpoint(str(file), return_tensors=False)
    config = AutoConfig.for_model(**checkpoint["config"])
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=reference)["tensors"]
    missing, unexpected = reference.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    reference.tie_weights()
    return reference
