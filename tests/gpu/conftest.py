"""These tests need an NVIDIA GPU and FlashInfer; elsewhere they are skipped."""

import importlib.util

import pytest
import torch
from gpu_models import tiny


def pytest_collection_modifyitems(items):
    missing = None
    if not torch.cuda.is_available():
        missing = "there is no GPU"
    elif importlib.util.find_spec("flashinfer") is None:
        missing = "FlashInfer is not installed"
    if missing:
        for item in items:
            if item.path.parent.name == "gpu":
                item.add_marker(pytest.mark.skip(reason=missing))


def on_gpu(kind, tmp_path_factory):
    """A directory, and transformers' model of it."""
    model = tiny(kind, **({"num_attention_heads": 4, "head_dim": 128} if kind == "qwen2" else {}))
    folder = tmp_path_factory.mktemp(kind)
    model.save_pretrained(folder)
    return str(folder), model.cuda()


@pytest.fixture(scope="session", params=["llama", "qwen2", "qwen3"])
def family_on_gpu(request, tmp_path_factory):
    return on_gpu(request.param, tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_on_gpu(tmp_path_factory):
    return on_gpu("llama", tmp_path_factory)
