"""What keeps a model's steps on a GPU from being CUDA graphs is said in words, before any kernel is built."""

import msgspec
import pytest
import torch

from tidegate.base.specs import LatentSpec, ModelSpec
from tidegate.kernels.gpu_support import why_no_graphs
from tidegate.kernels.step_rows import Types

LLAMA = ModelSpec("LlamaForCausalLM", 2, 64, 6, 2, 48, 64, 50, 512)
LATENT = ModelSpec(
    "DeepseekV3ForCausalLM", 2, 64, 6, 1, 56, 64, 50, 512, latent=LatentSpec(40, 16, 16, 16, None, 0.1, True)
)


@pytest.mark.parametrize(
    ("spec", "dtype", "said"),
    [
        (LLAMA, torch.float32, "float32"),
        (LLAMA, torch.bfloat16, "heads of 48 elements"),
        (msgspec.structs.replace(LLAMA, layer_windows=(None, 8)), torch.bfloat16, "several"),
        (msgspec.structs.replace(LLAMA, transformers_config="{}"), torch.bfloat16, "transformers"),
        (LATENT, torch.bfloat16, "40 and 16"),
    ],
)
def test_reasons(spec, dtype, said):
    assert said in why_no_graphs(spec, Types(dtype, dtype), torch.device("cuda", 0))
