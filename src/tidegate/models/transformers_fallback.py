"""Any decoder that transformers knows, by its own modules, over our weights and our paged attention.

Slower than a family of our own, since every small operation is a call of torch's, and right: what is computed is
transformers' code. ``models.transformers_config`` decides which models that holds for, and once their weights are
there ``check_tokens_apart``.
"""

import copy
import functools
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tidegate.base.errors import ModelError
from tidegate.base.specs import ModelSpec
from tidegate.kernels.attention import Attention, AttentionRows
from tidegate.kernels.linear import Linear
from tidegate.models.transformers_config import parse_config

_numbers = itertools.count()


class TransformersModel:
    """See ``models.registry.Model``."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, torch.Tensor],
        attention: Attention,
        products: Mapping[str, Linear] | None = None,
    ) -> None:
        """Products are the modules' own, so there must be no ``products``."""
        from transformers import AttentionInterface

        assert not products
        model = copy.deepcopy(skeleton(spec))
        # The interface knows attention by name only, and every model has an attention of its own. Since no mask goes by
        # this name, transformers makes none.
        name = f"tidegate-{next(_numbers)}"
        AttentionInterface.register(name, self._attend)
        model.config._attn_implementation = name
        aliases = tensor_names(model)
        model.load_state_dict({alias: weights[stored] for alias, stored in aliases.items()}, assign=True)
        model.requires_grad_(False).eval().to(next(iter(weights.values())).device)
        self._attention = attention
        self._decoder = getattr(model, model.base_model_prefix)
        self._given = _Given()
        self._head = _with_decoder(model, self._given)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = self._decoder(input_ids=tokens.long()[None], position_ids=positions.long()[None], use_cache=False)
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden if wanted is None else hidden[wanted]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """By the model's own head, with all that it does to logits."""
        self._given.hidden = hidden[None]
        nobody = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        logits: torch.Tensor = self._head(input_ids=nobody, use_cache=False).logits[0]
        return logits.float()

    def _attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        scaling: float | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """transformers' attention interface: ``query [1, Hq, T, D]``, ``key``, ``value [1, Hkv, T, D]`` to
        ``[1, T, Hq, D]``. Options have been examined before."""
        assert attention_mask is None
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        if scaling is not None:
            ours = q.shape[-1] ** -0.5  # which every backend applies
            q = q if scaling == ours else q * (scaling / ours)
        return self._attention.run(module.layer_idx, q, k, v)[None], None


class _Given(nn.Module):
    """Stands for a decoder whose hidden states ``[1, N, hidden]`` are known already."""

    hidden: torch.Tensor

    @property
    def decoder(self) -> "_Given":
        """For heads that ask a decoder within the decoder (OPT's)."""
        return self

    def forward(self, *_: Any, **__: Any) -> "_Outputs":
        return _Outputs(self.hidden)


class _Outputs:
    """What a decoder returns to its head: hidden states, and none of the rest that there could be."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def _with_decoder(model: Any, decoder: nn.Module) -> Any:
    """The model again, sharing all but its decoder."""
    other = copy.copy(model)
    other._modules = model._modules | {model.base_model_prefix: decoder}
    return other


class _TokenWise:
    """In the place of attention: something that depends on a token's own query, key and value, and on nothing else."""

    def plan(self, rows: AttentionRows) -> None:
        pass

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q + (k + v).repeat_interleave(q.shape[1] // k.shape[1], dim=1)


@torch.inference_mode()
def check_tokens_apart(spec: ModelSpec, weights: Mapping[str, torch.Tensor]) -> None:
    """Raises ModelError where tokens reach each other other than through attention (convolutions, recurrent states), or
    where their positions are not those that are given: then steps that mix sequences would be wrong.

    Two tokens in a step are swapped, which must not change them where attention keeps them apart.
    """
    model = TransformersModel(spec, weights, _TokenWise())
    device = next(iter(weights.values())).device
    tokens, positions = torch.tensor([1, 2], device=device), torch.tensor([3, 7], device=device)
    hidden, swapped = model.forward(tokens, positions), model.forward(tokens.flip(0), positions.flip(0)).flip(0)
    tolerance = 1e-3 if hidden.dtype == torch.float32 else 5e-2
    if not (hidden - swapped).abs().max() <= tolerance * hidden.abs().max():
        raise ModelError(
            f"{spec.architecture} can't be served by transformers' modules: its tokens reach each other in other ways "
            f"than attention, or it does not take their positions as given."
        )


@functools.cache
def skeleton(spec: ModelSpec) -> Any:
    """The model's modules, with parameters that have shapes and no memory; buffers that follow from the configuration
    are there. Importing transformers and making it take seconds."""
    from transformers.models.auto import AutoModelForCausalLM

    assert spec.transformers_config is not None
    config = parse_config(spec.transformers_config, spec.architecture)
    with _parameters_without_memory():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point():
            raise ModelError(f"{spec.architecture} stores {name!r} as integers, which is not supported.")
    return model


def tensor_names(model: Any) -> dict[str, str]:
    """Every name that the model's state has, and the name that the tensor is stored under: the first of those that are
    tied to each other."""
    stored: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {name: stored.setdefault(id(tensor), name) for name, tensor in state.items()}


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name to shape of every stored tensor, in the model's order."""
    model = skeleton(spec)
    state = model.state_dict()
    return {name: tuple(state[name].shape) for name in dict.fromkeys(tensor_names(model).values())}


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Modules made meanwhile have meta parameters and real buffers (torch's "meta" device would take both)."""
    register = nn.Module.register_parameter

    def register_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = register_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
