"""What can't be served on a GPU ends with one sentence and exit code 2."""

import os
from pathlib import Path

import pytest
from refusal import ON_A_GPU, UNDIVIDED, check, refusal

WITHOUT_GREEN_CONTEXTS = Path(__file__).parent / "undivided"


@pytest.mark.parametrize("case", ON_A_GPU)
def test_what_does_not_fit(tiny_config, case):
    check(tiny_config, case)


def test_a_driver_without_green_contexts(tiny_config):
    path = os.pathsep.join([str(WITHOUT_GREEN_CONTEXTS), os.environ.get("PYTHONPATH", "")])
    said = refusal(tiny_config, "--load-format", "dummy", "--mode", "semi", PYTHONPATH=path)
    assert all(word in said for word in UNDIVIDED), said


def test_a_gpu_that_cuda_does_not_find(tiny_config):
    said = refusal(tiny_config, "--load-format", "dummy", "--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert "no GPU can be used" in said and "built for CUDA" in said and "--device cpu" in said
