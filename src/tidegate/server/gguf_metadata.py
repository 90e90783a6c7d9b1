"""The key-value section of a GGUF file, read without touching its tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

import struct
from pathlib import Path
from typing import Any, BinaryIO

from tidegate.base.errors import ModelError

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """All metadata of the file by key. Raises ModelError if it is not a GGUF file that can be read."""
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelError(f"{path} is not a GGUF file.")
            version, _tensors, entries = _unpack(file, "IQQ")
            if version not in (2, 3):
                raise ModelError(f"{path} has GGUF version {version}; versions 2 and 3 can be read.")
            return {_string(file): _value(file, _unpack(file, "I")[0]) for _ in range(entries)}
    except (OSError, struct.error, UnicodeDecodeError, KeyError) as error:
        raise ModelError(f"{path} can't be read as a GGUF file: {error!r}.") from error


def _unpack(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    record = struct.Struct("<" + layout)
    return record.unpack(file.read(record.size))


def _string(file: BinaryIO) -> str:
    (length,) = _unpack(file, "Q")
    return file.read(length).decode("utf-8")


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        element, count = _unpack(file, "IQ")
        if element in _SCALARS:
            return list(_unpack(file, f"{count}{_SCALARS[element]}"))
        return [_value(file, element) for _ in range(count)]
    return _unpack(file, _SCALARS[kind])[0]
