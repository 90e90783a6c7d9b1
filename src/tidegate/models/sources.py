"""Where a model comes from: ``open_model`` looks at a path or hub id and picks the reader. Opening reads no weights."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from tidegate.base.errors import ModelError
from tidegate.base.specs import ModelSpec, Shard
from tidegate.models.config import SUPPORTED_ARCHITECTURES, spec_from_hf
from tidegate.models.hub import snapshot
from tidegate.models.weights import WHOLE

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_HUB_DESCRIPTION = ["*.json", "*.model", "*.txt", "*.jinja"]


class ModelSource(Protocol):
    """A model that can be loaded. ``tokenizer_dir`` holds its tokenizer's files; without it, ``gguf_file`` does."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def tokenizer_dir(self) -> Path | None: ...

    @property
    def gguf_file(self) -> Path | None: ...

    def load(self, into: Mapping[str, torch.Tensor], progress: Callable[[float], None], shard: Shard = WHOLE) -> None:
        """Fills every tensor of ``models.weights.layout(divide(spec, shard))`` in place, converting to its type, and
        reads no more of the files than that; ``progress`` gets the fraction done. Raises ModelError naming the first
        tensor that is missing or has another shape."""
        ...


def open_model(path: str, load_format: str = "auto", seed: int = 0) -> ModelSource:
    """The model at ``path``: a directory with config.json and safetensors, a ``.gguf`` file, or a hub id (the local
    cache is asked first). ``load_format`` "dummy" needs only a configuration (a directory, ``.json`` or ``.gguf``
    file, or hub id) and draws weights from ``seed``. Raises ModelError."""
    # Readers are imported where they are chosen: each brings a library that the others don't need.
    if load_format not in LOAD_FORMATS:
        raise ModelError(f"Load format {load_format!r} is unknown; choose from {', '.join(LOAD_FORMATS)}.")
    place = _locate(path, load_format)
    if place.suffix == ".gguf":
        if load_format == "safetensors":
            raise ModelError(f"{place} is a GGUF file; it can't be loaded as safetensors.")
        from tidegate.models.gguf_source import GgufSource

        gguf_source = GgufSource(place, _tokenizer_dir(place.parent))
        if load_format != "dummy":
            return gguf_source
        return _dummy(gguf_source.spec, seed, gguf_source.tokenizer_dir, place)
    if load_format == "gguf":
        raise ModelError(f"{path} is not a .gguf file and holds none.")
    config = place if place.suffix == ".json" else place / "config.json"
    spec, tokenizer_dir = _read_spec(config), _tokenizer_dir(config.parent)
    if load_format == "dummy":
        return _dummy(spec, seed, tokenizer_dir, None)
    if place.suffix == ".json":
        raise ModelError(f"{place} is only a configuration; give the directory, or use load format 'dummy'.")
    if spec.transformers_config is not None:
        from tidegate.models.transformers_source import TransformersSource

        return TransformersSource(place, spec, tokenizer_dir)
    from tidegate.models.safetensors_source import SafetensorsSource

    return SafetensorsSource(place, spec, tokenizer_dir)


def _dummy(spec: ModelSpec, seed: int, tokenizer_dir: Path | None, gguf_file: Path | None) -> ModelSource:
    from tidegate.models.dummy_source import DummySource

    spec = msgspec.structs.replace(spec, fp8=None)  # weights that are drawn are not quantised before they are
    return DummySource(spec, seed, tokenizer_dir, gguf_file)


def _locate(path: str, load_format: str) -> Path:
    """A file, or a directory that holds config.json."""
    place = Path(path).expanduser()
    if place.is_file():
        if place.suffix not in (".gguf", ".json"):
            raise ModelError(f"{path} is neither a directory nor a .gguf file.")
        return place
    if not place.is_dir():
        if path.count("/") > 1 or path.startswith((".", "/", "~")) or place.suffix in (".gguf", ".json"):
            raise ModelError(f"There is no file or directory {path}.")
        place = _from_hub(path, with_weights=load_format != "dummy")
    ggufs = sorted(place.glob("*.gguf"))
    if load_format == "gguf" or not (place / "config.json").exists():
        if len(ggufs) == 1:
            return ggufs[0]
        if ggufs:
            raise ModelError(f"{place} holds {len(ggufs)} GGUF files; name one of them.")
    return place


def _from_hub(model_id: str, with_weights: bool) -> Path:
    """The directory of a hub model's snapshot, downloaded only if the local cache lacks it."""

    def complete(cached: Path) -> bool:
        return (cached / "config.json").exists() and (not with_weights or any(cached.glob("*.safetensors")))

    return snapshot(model_id, _HUB_DESCRIPTION + (["*.safetensors"] if with_weights else []), complete)


def _read_spec(config: Path) -> ModelSpec:
    if not config.exists():
        raise ModelError(f"{config.parent} holds no {config.name}.")
    generation_file = config.with_name("generation_config.json")
    described = _read_json(config)
    generation = _read_json(generation_file) if generation_file.exists() else None
    if set(described.get("architectures") or ()).intersection(SUPPORTED_ARCHITECTURES):
        return spec_from_hf(described, generation)
    from tidegate.models.transformers_config import spec_from_transformers

    return spec_from_transformers(described, generation)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"Can't read {file}: {error}.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} is not a JSON object.")
    return content


def _tokenizer_dir(folder: Path) -> Path | None:
    return folder if any((folder / name).exists() for name in _TOKENIZER_FILES) else None
