"""Whether there is a GPU that torch can compute on, and if not, why."""

import importlib.util
import warnings
from pathlib import Path

import torch


def why_no_gpu() -> str | None:
    """None where a first kernel ran; otherwise the reason, for people. Creates the device's context."""
    if torch.version.cuda is None:
        return "this torch is a CPU build"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch would warn of is part of the answer
            torch.cuda.init()
        torch.ones(1, device="cuda").add_(1).cpu()
    except (RuntimeError, AssertionError) as error:
        said = str(error).strip().splitlines()[0].split(". ")[0].rstrip(".:")
        return f"{said} (this torch is built for CUDA {torch.version.cuda})"
    return None


def cuda_bindings_installed() -> bool:
    """The package through which memory and green contexts are asked of the driver."""
    return bool(importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.bindings"))


def nvidia_device_present() -> bool:
    """Whether the kernel has an NVIDIA GPU, whatever torch makes of it."""
    return Path("/dev/nvidiactl").exists() and any(Path("/dev").glob("nvidia[0-9]*"))
