"""Small random models for tests on a GPU."""

import torch


def tiny(kind, **more):
    """A small random model with the head size that the kernels are built for, in float32 on the GPU."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

    shape = {
        "vocab_size": 1000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 4096,
    } | more  # fmt: skip
    torch.manual_seed(1)
    config = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[kind](**shape)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            norm = "norm" in name
            weight.normal_(1.0 if norm else 0.0, 0.1 if norm else 0.04)
            weight.copy_(weight.to(torch.bfloat16))  # so that both compute with the same weights
    return model.eval()
