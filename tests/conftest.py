import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helpers that several folders use


@pytest.fixture(scope="session")
def smollm2():
    """The small real model: its GGUF file, and transformers' model and tokenizer of the same file, in float32."""
    from gguf_reference import transformers_model
    from transformers import AutoTokenizer

    from tidegate.models.demo import demo_model_path

    path = demo_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return str(path), transformers_model(path), tokenizer
