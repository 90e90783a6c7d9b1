"""Whether a model's steps can be CUDA graphs over FlashInfer's kernels on this GPU."""

import torch

from tidegate.base.specs import ModelSpec

HEAD_DIMS = (64, 128, 256)  # that FlashInfer's FA2 and FA3 kernels are made for


def why_no_graphs(spec: ModelSpec, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device) -> str | None:
    """None where they can; otherwise the reason, for people. Builds the kernels where they are not there yet."""
    if dtype != torch.bfloat16:
        return f"the fast kernels do not compute in {str(dtype).removeprefix('torch.')}"
    if spec.transformers_config is not None:
        return f"transformers' modules, which compute {spec.architecture}, are not made for them"
    if spec.layer_windows is not None:
        return "the fast kernels are planned for one sliding window, and this model's layers have several"
    if spec.latent is not None:
        return "the fast kernels are for keys and values, and this model keeps latent vectors"
    if spec.head_dim not in HEAD_DIMS:
        return f"FlashInfer has no kernels for heads of {spec.head_dim} elements"
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return f"the prefill kernel is for compute capability 9, and this GPU has {major}.{minor}"
    try:
        from tidegate.kernels.flashinfer_attention import Types, build

        build(spec, Types(dtype, kv_dtype))
    except ImportError as error:
        return f"FlashInfer can't be imported ({_first_line(error)}): pip install 'tidegate[cuda]'"
    except Exception as error:  # whatever a compiler, a linker or a loader says
        return f"FlashInfer could not build its kernels ({_first_line(error)})"
    return None


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
