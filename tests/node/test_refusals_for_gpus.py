"""What can't be served on a GPU ends with one sentence and exit code 2. The CPU stands for the GPU."""

import os
from pathlib import Path

import pytest
import torch
from refusal import ON_A_GPU, UNDIVIDED, check, refusal

AS_GPU = Path(__file__).parent / "cpu_as_gpu"


@pytest.fixture
def cpu_as_gpu(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(AS_GPU), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.parametrize("case", ON_A_GPU)
def test_what_does_not_fit(tiny_config, case, cpu_as_gpu):
    check(tiny_config, case)


def test_a_driver_without_green_contexts(tiny_config, cpu_as_gpu):
    asked = [tiny_config, "--load-format", "dummy", "--mode", "semi", "--kv-cache-memory-bytes", "16MiB"]
    said = refusal(*asked, CPU_AS_GPU="undivided")
    assert all(word in said for word in UNDIVIDED), said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_torch_can_not_use(tiny_config):
    said = refusal(tiny_config, "--load-format", "dummy", "--device", "cuda")
    assert "no GPU can be used" in said and "--device cpu" in said
