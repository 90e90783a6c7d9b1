"""A GGUF file's header: metadata values, and where each tensor lies.

``gguf.GGUFReader`` makes Python objects of every token and merge of the vocabulary, which takes seconds; here arrays
are stepped over. Format: the GGUF specification, versions 2 and 3, little-endian.
"""

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt

from tidegate.base.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GgufTensor(NamedTuple):
    """``shape`` is in torch's order (rows first); ``data`` is a view of the file: bytes ``[rows, bytes a row]``."""

    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    data: npt.NDArray[np.uint8]


class GgufFile:
    """An open file. ``metadata`` holds every value but arrays. Raises ModelError when the file is no sound GGUF."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._parse()
        except OSError as error:
            raise ModelError(f"Can't read {path}: {error.strerror}.") from error
        except (ValueError, struct.error) as error:
            raise ModelError(f"{path} is not a readable GGUF file: {error}.") from error

    def _parse(self) -> None:
        magic, version, num_tensors, num_values = struct.unpack_from("<4sIQQ", self._bytes)
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError("its first bytes are not those of GGUF version 2 or 3")
        at = struct.calcsize("<4sIQQ")
        for _ in range(num_values):
            key, at = self._string(at)
            (kind,) = struct.unpack_from("<I", self._bytes, at)
            if kind == _ARRAY:
                at = self._after_array(at + 4)
            else:
                self.metadata[key], at = self._value(kind, at + 4)
        infos = []
        for _ in range(num_tensors):
            name, at = self._string(at)
            (num_dims,) = struct.unpack_from("<I", self._bytes, at)
            *dims, kind, offset = struct.unpack_from(f"<{num_dims}QIQ", self._bytes, at + 4)
            at += 4 + 8 * num_dims + 12
            infos.append((name, tuple(reversed(dims)), kind, offset))
        alignment = self.metadata.get("general.alignment", 32)
        data_start = -(-at // alignment) * alignment
        for name, shape, kind, offset in infos:
            self.tensors[name] = self._tensor(shape, gguf.GGMLQuantizationType(kind), data_start + offset)

    def _tensor(self, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType, start: int) -> GgufTensor:
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        row_bytes = shape[-1] // block_elements * block_bytes
        data = np.frombuffer(self._bytes, np.uint8, count=row_bytes * int(np.prod(shape[:-1])), offset=start)
        return GgufTensor(shape, kind, data.reshape(-1, row_bytes))

    def _string(self, at: int) -> tuple[str, int]:
        (length,) = struct.unpack_from("<Q", self._bytes, at)
        end = at + 8 + length
        return self._bytes[at + 8 : end].decode(), end

    def _value(self, kind: int, at: int) -> tuple[Any, int]:
        if kind == _STRING:
            return self._string(at)
        if kind not in _SCALARS:
            raise ValueError(f"unknown metadata type {kind}")
        code = "<" + _SCALARS[kind]
        return struct.unpack_from(code, self._bytes, at)[0], at + struct.calcsize(code)

    def _after_array(self, at: int) -> int:
        kind, count = struct.unpack_from("<IQ", self._bytes, at)
        at += 12
        if kind == _STRING:
            for _ in range(count):
                at += 8 + int.from_bytes(self._bytes[at : at + 8], "little")
        elif kind == _ARRAY:
            for _ in range(count):
                at = self._after_array(at)
        elif kind in _SCALARS:
            at += count * struct.calcsize("<" + _SCALARS[kind])
        else:
            raise ValueError(f"unknown metadata type {kind}")
        return at
