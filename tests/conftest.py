import json
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helpers that several folders use

# A shell has Ctrl-C ignored by what it starts in the background, and what that starts would ignore it, too.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2():
    """The small real model: its GGUF file, and transformers' model and tokenizer of the same file, in float32."""
    from gguf_reference import transformers_model
    from transformers import AutoTokenizer

    from tidegate.models.demo import demo_model_path

    path = demo_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return str(path), transformers_model(path), tokenizer


@pytest.fixture
def tiny_config(tmp_path):
    """A directory with the configuration of a small model, to be served with random weights."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 500, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "eos_token_id": 0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)
