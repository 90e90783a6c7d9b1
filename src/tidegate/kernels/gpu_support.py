"""Whether a model's steps can be CUDA graphs over FlashInfer's kernels on this GPU."""

import torch

from tidegate.base.specs import LatentSpec, ModelSpec
from tidegate.kernels.pod_rule import DECODE_TILE
from tidegate.kernels.step_rows import Types

HEAD_DIMS = (64, 128, 256)  # that FlashInfer's FA2 and FA3 kernels are made for
POD_HEAD_DIMS = (64, 128)  # that its POD kernel is


def why_no_graphs(spec: ModelSpec, types: Types, device: torch.device) -> str | None:
    """None where they can; otherwise the reason, for people. Builds the kernels where they are not there yet."""
    if types.compute != torch.bfloat16:
        return f"the fast kernels do not compute in {str(types.compute).removeprefix('torch.')}"
    if spec.transformers_config is not None:
        return f"transformers' modules, which compute {spec.architecture}, are not made for them"
    if spec.layer_windows is not None:
        return "the fast kernels are planned for one sliding window, and this model's layers have several"
    if spec.latent is not None:
        return _why_no_latent_graphs(spec.latent)
    if spec.head_dim not in HEAD_DIMS:
        return f"FlashInfer has no kernels for heads of {spec.head_dim} elements"
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return f"the prefill kernel is for compute capability 9, and this GPU has {major}.{minor}"
    try:
        from tidegate.kernels.flashinfer_attention import build

        build(spec, types)
    except ImportError as error:
        return f"FlashInfer can't be imported ({_first_line(error)}): pip install 'tidegate[cuda]'"
    except Exception as error:  # whatever a compiler, a linker or a loader says
        return f"FlashInfer could not build its kernels ({_first_line(error)})"
    return None


def why_no_pod(spec: ModelSpec, types: Types) -> str | None:
    """None where attention of prompts and decodes can be one kernel (``kernels.pod_attention``), given that steps can
    be graphs; otherwise the reason. Builds the kernel where it is not there yet."""
    if spec.latent is not None:
        return "the kernel for both is not made for latent vectors"
    if types.kv != types.compute:
        return "the kernel for both is not used with keys and values in FP8"
    if spec.sliding_window is not None:
        return "the kernel for both is not used with sliding windows"
    if spec.head_dim not in POD_HEAD_DIMS:
        return f"the kernel for both is not made for heads of {spec.head_dim} elements"
    if spec.num_heads // spec.num_kv_heads > DECODE_TILE:
        return f"the kernel for both takes at most {DECODE_TILE} query heads for one of keys and values"
    try:
        from tidegate.kernels.pod_attention import build

        build(spec, types)
    except Exception as error:  # whatever a compiler, a linker or a loader says
        return f"FlashInfer could not build its kernel for both ({_first_line(error)})"
    return None


def _why_no_latent_graphs(latent: LatentSpec) -> str | None:
    """Their kernels are Triton's, compiled when a graph is first made; the small ones beside them are FlashInfer's."""
    if any(size < 16 or size & (size - 1) for size in (latent.rank, latent.rope_dim)):
        return f"the fast kernels take powers of two, and latent vectors here have {latent.rank} and {latent.rope_dim}"
    try:
        import tidegate.kernels.cuda_ops
        import tidegate.kernels.triton_latent_attention  # noqa: F401
    except ImportError as error:
        return f"what the fast kernels need can't be imported ({_first_line(error)}): pip install 'tidegate[cuda]'"
    return None


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
