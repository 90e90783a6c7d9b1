"""Weights for the modules of transformers, from a Hugging Face directory."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tidegate.base.errors import ModelError
from tidegate.base.specs import ModelSpec, Shard
from tidegate.models.safetensors_source import copy_tensor, open_tensors, weight_files
from tidegate.models.shards import Cut
from tidegate.models.transformers_fallback import check_tokens_apart, skeleton, tensor_names
from tidegate.models.weights import WHOLE, fill


class TransformersSource:
    """See ``models.sources.ModelSource``. Checkpoints whose tensors lie as the modules have them are read straight into
    place; those that transformers rearranges while it loads them are loaded by it, beside, and copied."""

    def __init__(self, folder: Path, spec: ModelSpec, tokenizer_dir: Path | None) -> None:
        self.spec = spec
        self.tokenizer_dir = tokenizer_dir
        self.gguf_file: Path | None = None
        self._folder = folder
        self._files = weight_files(folder)

    def load(self, into: Mapping[str, torch.Tensor], progress: Callable[[float], None], shard: Shard = WHOLE) -> None:
        where = open_tensors(self._folder, self._files)
        found = {name: self._name_in(where, name) for name in into}
        if all(found.values()):

            def copy(part: str, out: torch.Tensor, cut: Cut) -> None:
                copy_tensor(where, str(found[part]), out, cut, self._folder)

            fill(self.spec, into, copy, progress, shard)
        else:
            state = self._by_transformers(next(iter(into.values())).dtype)

            def read(part: str, out: torch.Tensor, cut: Cut) -> None:
                out.copy_(state[part])

            fill(self.spec, into, read, progress, shard)
        check_tokens_apart(self.spec, into)

    def _name_in(self, where: Mapping[str, Any], stored: str) -> str | None:
        """The checkpoint's name of a tensor: any of its own, with or without the prefix of the model's decoder."""
        model = skeleton(self.spec)
        prefix = model.base_model_prefix + "."
        own = [name for name, first in tensor_names(model).items() if first == stored]
        names = own + [name.removeprefix(prefix) for name in own] + [prefix + name for name in own]
        return next((name for name in names if name in where), None)

    def _by_transformers(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        from transformers.models.auto import AutoModelForCausalLM

        options = {"dtype": dtype, "local_files_only": True, "output_loading_info": True}
        try:
            model, info = AutoModelForCausalLM.from_pretrained(str(self._folder), **options)
        except (OSError, ValueError, RuntimeError) as error:
            raise ModelError(f"Can't read the weights in {self._folder}: {str(error).splitlines()[0]}") from error
        missing = sorted(info["missing_keys"])
        if missing:
            raise ModelError(f"The weights in {self._folder} have no tensor {missing[0]!r}.")
        state: dict[str, torch.Tensor] = model.state_dict()
        return state
