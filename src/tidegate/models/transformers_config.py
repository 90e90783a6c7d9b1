"""Whether a model that only transformers knows can be served by its own modules, and the ``ModelSpec`` that follows.

Nothing that a configuration says is believed of its attention. Instead one forward pass is run on tensors without
memory, and what each layer asks of the attention interface is looked at: shapes, masks, and everything else. What paged
attention can't give exactly is refused in a sentence.
"""

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tidegate.base.errors import ModelError
from tidegate.base.specs import ModelSpec
from tidegate.models.config import SUPPORTED_ARCHITECTURES, Config, token_ids

_NAME = "tidegate-examination"
# Arguments of attention that change nothing here: training's, the cache's, and what is said by other means.
_HARMLESS = frozenset({"dropout", "scaling", "sliding_window", "position_ids", "use_cache", "is_causal"})
# Frequencies that depend on the longest sequence in the batch: a token would depend on its neighbours.
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})

log = logging.getLogger(__name__)


class _Mask(NamedTuple):
    allows: Callable[..., torch.Tensor]  # (batch, head, query position, key position) -> whether it is seen
    window: int | None


class _Call(NamedTuple):
    """What one layer asked for. Shapes are ``[1, heads, tokens, head_dim]``."""

    layer: int | None
    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    mask: _Mask | None  # None: one that did not come from the mask interface
    options: dict[str, Any]


def spec_from_transformers(config: Config, generation: Config | None = None) -> ModelSpec:
    """As ``models.config.spec_from_hf``, for architectures of which only transformers has modules.

    Raises ModelError where transformers is not installed, does not know the model, or where it needs more than paged,
    causal attention with windows.
    """
    name = str((config.get("architectures") or ["none"])[0])
    parsed = parse_config(json.dumps(dict(config)), name)
    calls = _attention_calls(parsed, name)
    heads, head_dim = calls[0].q[1], calls[0].q[3]
    windows = tuple(call.mask.window for call in calls if call.mask is not None)
    log.warning("%s is computed by transformers' own modules: right, but slower than a family of our own", name)
    return ModelSpec(
        architecture=name,
        num_layers=len(calls),
        hidden_size=int(parsed.hidden_size),
        num_heads=heads,
        num_kv_heads=calls[0].k[1],
        head_dim=head_dim,
        ffn_size=int(getattr(parsed, "intermediate_size", None) or 0),
        vocab_size=int(parsed.vocab_size),
        max_len=int(parsed.max_position_embeddings),
        sliding_window=windows[0] if len(set(windows)) == 1 else None,
        layer_windows=windows if len(set(windows)) > 1 else None,
        eos_ids=token_ids(parsed.eos_token_id, (generation or {}).get("eos_token_id")),
        bos_id=next(iter(token_ids(parsed.bos_token_id)), None),
        transformers_config=json.dumps(dict(config)),
    )


def parse_config(text: str, architecture: str) -> Any:
    """transformers' own configuration object of a config.json's text."""
    try:
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError as error:
        raise ModelError(
            f"{architecture} is computed by transformers' own modules, which are not installed: "
            f"pip install 'tidegate[transformers]'"
        ) from error
    config = json.loads(text)
    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind) != architecture:
        raise ModelError(
            f"Architecture {architecture} is not supported: it is none of {', '.join(SUPPORTED_ARCHITECTURES)}, and "
            f"transformers {transformers.__version__} has no such decoder."
        )
    if config.get("quantization_config"):
        raise ModelError(f"Quantized checkpoints of {architecture} are not supported; use the unquantized model.")
    try:
        parsed = CONFIG_MAPPING[kind].from_dict(config)
    except Exception as error:  # whatever a configuration class checks
        raise ModelError(
            f"{architecture} has a configuration that transformers refuses: {_first_line(error)}"
        ) from error
    batch_dependent = _BATCH_DEPENDENT_ROPE.intersection(_rope_kinds(parsed.to_dict()))
    if batch_dependent:
        raise ModelError(
            f"RoPE scaling {', '.join(sorted(batch_dependent))!r} is not supported: a token would depend on the other "
            f"sequences in its batch."
        )
    for needed in ("hidden_size", "vocab_size", "max_position_embeddings"):
        if getattr(parsed, needed, None) is None:
            raise ModelError(f"The configuration of {architecture} has no {needed!r}.")
    return parsed


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no reason given'}"


def _rope_kinds(config: Any) -> Iterator[str]:
    """Every kind of rotary scaling that is named anywhere in a configuration."""
    for key, value in config.items() if isinstance(config, dict) else enumerate(config):
        if key in ("rope_type", "type") and isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            yield from _rope_kinds(value)


def _attention_calls(config: Any, name: str) -> list[_Call]:
    """One for each layer, in order, all of them such that paged attention gives what was asked for."""
    calls = _examine(config, name)
    reason = _unservable(calls, int(config.num_hidden_layers))
    if reason is not None:
        raise ModelError(f"{name} can't be served by transformers' modules: {reason}.")
    return calls


def _examine(config: Any, name: str) -> list[_Call]:
    """Runs two tokens through a model without memory, and returns what reached the attention interface."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.models.auto import AutoModelForCausalLM

    calls: list[_Call] = []
    masks: list[tuple[torch.Tensor, _Mask]] = []

    def attend(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        mask = next((made for tensor, made in masks if tensor is attention_mask), None)
        shapes = tuple(query.shape), tuple(key.shape), tuple(value.shape)
        calls.append(_Call(getattr(module, "layer_idx", None), *shapes, mask, options))
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    def make_mask(mask_function: Callable[..., torch.Tensor], **options: Any) -> torch.Tensor:
        masks.append((torch.empty(1, 1, 2, 2), _Mask(mask_function, options.get("local_size"))))
        return masks[-1][0]

    AttentionInterface.register(_NAME, attend)
    AttentionMaskInterface.register(_NAME, make_mask)
    noise = logging.getLogger("torch._subclasses.fake_tensor")
    level = noise.level
    noise.setLevel(logging.CRITICAL)
    try:
        with FakeTensorMode(), torch.inference_mode():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=_NAME)
            if model._can_set_experts_implementation():
                model.set_experts_implementation("batched_mm")  # whose shapes do not depend on values
            tokens, ones = torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2, dtype=torch.int64)
            model(input_ids=tokens, position_ids=torch.arange(2)[None], attention_mask=ones, use_cache=False)
    except Exception as error:  # whatever a model's own code may raise
        raise ModelError(f"{name} can't be served by transformers' modules ({_first_line(error)}).") from error
    finally:
        noise.setLevel(level)
    return calls


def _unservable(calls: list[_Call], num_layers: int) -> str | None:
    """Why paged attention can't answer these calls; None if it can."""
    if [call.layer for call in calls] != list(range(num_layers)):
        return f"of its {num_layers} layers, not all attend once and through transformers' attention interface"
    if any((call.q, call.k, call.v) != (calls[0].q, calls[0].k, calls[0].v) for call in calls):
        return "its layers have heads of different numbers or sizes"
    if calls[0].k != calls[0].v or calls[0].q[3] != calls[0].k[3]:
        return "its queries, keys and values have different sizes"
    for call in calls:
        if call.mask is None or not _is_causal(call.mask):
            return "a layer's attention mask is neither causal nor a sliding window"
        for option, value in call.options.items():
            if option not in _HARMLESS and value is not None and value is not False:
                return f"its attention has {option!r}, which paged attention does not"
    return None


def _is_causal(mask: _Mask) -> bool:
    """Whether it is causal, with the window it says, at all edges there are."""
    width = mask.window or 1
    ends = torch.tensor([0, 1, width - 1, width, width + 1, 2 * width, 2 * width + 1, 5 * width + 3])
    offsets = torch.tensor([0, 1, width - 1, width, width + 1, 2 * width, -1, -2])
    q, back = (x.flatten() for x in torch.meshgrid(ends, offsets, indexing="ij"))
    q, k = q[back <= q], (q - back)[back <= q]
    zero = torch.zeros_like(q)
    expected = k <= q if mask.window is None else (k <= q) & (k > q - mask.window)
    try:
        return bool((mask.allows(zero, zero, q, k) == expected).all())
    except Exception:  # a mask that also looks at the examined tokens, which have no values
        return False
