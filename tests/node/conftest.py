import pytest
import torch
from engine_driver import mixed_prompts, reference
from transformers import AutoModelForCausalLM, LlamaConfig

VOCAB = 193
MAX_TOKENS = 20
LONGEST = 2000


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A directory with a tiny random Llama, and the same model in transformers."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2100,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1.0 if "norm" in name else 0.0, 0.2)
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    return str(folder), model


@pytest.fixture(scope="session")
def references(tiny_model):
    """32 prompts of 1 to 2,000 tokens and what transformers answers."""
    return [reference(tiny_model[1], prompt, MAX_TOKENS) for prompt in mixed_prompts(32, LONGEST, VOCAB)]
