"""Finding a model's tokenizer on disk: a Hugging Face directory or a GGUF file."""

import json
from pathlib import Path
from typing import Any

import tokenizers

from tidegate.base.errors import ConfigError, ModelError
from tidegate.server.chat_template import ChatTemplate
from tidegate.server.gguf_metadata import read_gguf_metadata
from tidegate.server.gguf_tokenizer import tokenizer_from_gguf
from tidegate.server.tokenizer import FastTokenizer

_GGUF_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def load_tokenizer(model: Path, chat_template: str | None = None) -> FastTokenizer | None:
    """The tokenizer of the model at ``model`` (a directory or a .gguf file), or None if it has none.

    ``chat_template``: a file, or the template itself, instead of the model's own.
    Raises ModelError if there is a tokenizer that can't be read, ConfigError for a bad template.
    """
    override = _template_source(chat_template) if chat_template else None
    if model.is_dir():
        return _from_directory(model, override)
    if model.suffix == ".gguf":
        return _from_gguf(model, override)
    raise ModelError(f"{model} is neither a directory nor a .gguf file, so no tokenizer can be looked for there.")


def _template_source(given: str) -> str:
    if "{" in given or "\n" in given:
        return given
    try:
        return Path(given).read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"The chat template file {given} can't be read: {error.strerror}.") from error


def _from_directory(directory: Path, override: str | None) -> FastTokenizer | None:
    config = _read_json(directory / "tokenizer_config.json")
    file = directory / "tokenizer.json"
    if file.exists():
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises bare Exception
            raise ModelError(f"{file} can't be read as a tokenizer: {error}.") from error
    elif any((directory / name).exists() for name in ("tokenizer.model", "vocab.json", "tokenizer_config.json")):
        tokenizer = _through_transformers(directory)
    else:
        return None
    special = _special_tokens(_read_json(directory / "special_tokens_map.json") | config)
    eos_ids = _ids(_read_json(directory / "generation_config.json").get("eos_token_id"))
    eos_ids += _ids(_read_json(directory / "config.json").get("eos_token_id"))
    if "eos_token" in special:
        eos_ids += _ids(tokenizer.token_to_id(special["eos_token"]))
    source = override or _directory_template(directory, config)
    return FastTokenizer(
        tokenizer,
        eos_ids=tuple(dict.fromkeys(eos_ids)),
        chat_template=ChatTemplate(source, special) if source else None,
    )


def _from_gguf(file: Path, override: str | None) -> FastTokenizer | None:
    metadata = read_gguf_metadata(file)
    tokens: list[str] | None = metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        return None
    tokenizer = tokenizer_from_gguf(metadata) or _through_transformers(file.parent, gguf_file=file.name)
    ids = {key.removeprefix("tokenizer.ggml.").removesuffix("_token_id"): id for key, id in metadata.items()}
    special = {name: tokens[ids[key]] for name, key in _GGUF_SPECIAL_TOKENS.items() if key in ids}
    eos_ids = [ids[key] for key in ("eos", "eot", "eom") if key in ids]
    source = override or metadata.get("tokenizer.chat_template")
    return FastTokenizer(
        tokenizer,
        eos_ids=tuple(dict.fromkeys(eos_ids)),
        chat_template=ChatTemplate(source, special) if source else None,
    )


def _through_transformers(directory: Path, **where: str) -> tokenizers.Tokenizer:
    """For formats that only transformers converts. Imported here because it is slow and imports torch."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ModelError(
            f"The tokenizer in {directory} is in a format that transformers converts, which is not installed: "
            f"pip install 'tidegate[transformers]'"
        ) from error
    try:
        loaded = AutoTokenizer.from_pretrained(str(directory), **where)
    except Exception as error:
        raise ModelError(f"The tokenizer in {directory} can't be loaded: {error}") from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelError(f"The tokenizer in {directory} has no fast form; convert it to a tokenizer.json.")
    return backend


def _directory_template(directory: Path, config: dict[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.exists():
        return file.read_text("utf-8")
    source = _read_json(directory / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(source, list):  # several named ones
        source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
    return source


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Entries like ``bos_token``, written as text or as ``{"content": text, ...}``."""
    tokens = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} can't be read as JSON: {error}.") from error
    return content if isinstance(content, dict) else {}
