"""``tidegate serve`` where it can't serve, as a user sees it."""

import json
import os
import subprocess
import sys
from pathlib import Path

# Of a GPU, by what is wrong: fields of the model's configuration, arguments, and words of the answer.
ON_A_GPU = {
    "no room for KV": ({}, ["--gpu-memory-utilization", "0.02"], ["GiB short", "raise it to more than"]),
    "a model that is too large": (
        {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 100},
        [],
        ["GiB more than the GPU has", "take a smaller model"],
    ),
    "more blocks than there is memory": (
        {},
        ["--num-gpu-blocks-override", "1000000000"],
        ["--num-gpu-blocks-override", "GiB more than there is", "lower it to at most"],
    ),
}
UNDIVIDED = ["this driver can't divide the GPU", "CUDA_ERROR_NOT_SUPPORTED", "--mode chunked or --sharing streams"]


def refusal(*arguments: str, **environment: str) -> str:
    """The one sentence with which it ends, with exit code 2."""
    command = [sys.executable, "-m", "tidegate.cli", "serve", "--port", "0", *arguments]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=os.environ | environment
    )
    assert ended.returncode == 2, ended.stderr
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("tidegate: ") and "Traceback" not in ended.stderr
    return last


def check(model: str, case: str) -> None:
    """``model``: a directory with a configuration, which is changed."""
    fields, arguments, words = ON_A_GPU[case]
    file = Path(model) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    said = refusal(model, "--load-format", "dummy", *arguments)
    assert all(word in said for word in words), said
