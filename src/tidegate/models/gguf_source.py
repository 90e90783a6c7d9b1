"""Weights from a GGUF file, dequantised block by block straight into their place."""

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import torch

from tidegate.base.errors import ModelError
from tidegate.base.specs import Shard
from tidegate.models.gguf_config import spec_from_gguf
from tidegate.models.gguf_file import GgufFile, GgufTensor
from tidegate.models.shards import Cut
from tidegate.models.weights import WHOLE, fill

_CHUNK_ELEMENTS = 1 << 18  # dequantised at a time: stays near the caches

_TOP = {"embed": "token_embd", "norm": "output_norm", "lm_head": "output"}
_IN_LAYER = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


class GgufSource:
    """See ``models.sources.ModelSource``."""

    def __init__(self, path: Path, tokenizer_dir: Path | None) -> None:
        self._file = GgufFile(path)
        self.spec = spec_from_gguf(self._file)
        self.tokenizer_dir = tokenizer_dir
        self.gguf_file: Path | None = path
        # The llama converter interleaves each head's two rotary halves; those of the Qwens do not.
        self._interleaved = self._file.metadata["general.architecture"] == "llama"

    def load(self, into: Mapping[str, torch.Tensor], progress: Callable[[float], None], shard: Shard = WHOLE) -> None:
        fill(self.spec, into, self._read, progress, shard)

    def _read(self, part: str, out: torch.Tensor, cut: Cut) -> None:
        name = gguf_name(part)
        tensor = self._file.tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self._file.path} has no tensor {name!r}.")
        if tensor.shape != cut.shape:
            raise ModelError(f"Tensor {name!r} in {self._file.path} is {tensor.shape}; expected {cut.shape}.")
        if self._interleaved and part.rpartition(".")[2].removesuffix("_bias") in ("q", "k"):
            rows = torch.empty(out.shape)
            _dequantize(tensor, rows, cut)
            pairs = (-1, self.spec.head_dim // 2, 2, *out.shape[1:])
            halves = (-1, 2, self.spec.head_dim // 2, *out.shape[1:])
            out.view(halves).copy_(rows.view(pairs).transpose(1, 2))
        else:
            _dequantize(tensor, out, cut)


def gguf_name(part: str) -> str:
    """The name in a GGUF file of a part as named by ``models.weights.parts``."""
    if part in _TOP:
        return f"{_TOP[part]}.weight"
    _, index, name = part.split(".")
    stem = name.removesuffix("_bias")
    return f"blk.{index}.{_IN_LAYER[stem]}.{'weight' if stem == name else 'bias'}"


def _dequantize(tensor: GgufTensor, out: torch.Tensor, cut: Cut) -> None:
    """Blocks lie within rows, so a cut by columns takes whole rows and keeps a part of each."""
    rows = out.view(-1, out.shape[-1])
    data, columns = tensor.data, slice(None)
    if cut.axis == len(cut.shape) - 1:
        columns = slice(cut.start, cut.stop)
    else:
        data = data[cut.start : cut.stop]
    step = max(1, _CHUNK_ELEMENTS // tensor.shape[-1])
    for start in range(0, rows.shape[0], step):
        try:
            values = gguf.dequantize(data[start : start + step], tensor.kind)
        except NotImplementedError as error:
            raise ModelError(f"GGUF quantisation {tensor.kind.name} is not supported.") from error
        rows[start : start + step].copy_(torch.from_numpy(values.reshape(-1, tensor.shape[-1])[:, columns]))
