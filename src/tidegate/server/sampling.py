"""From a request's fields to sampling parameters and limits that the engine takes."""

import secrets
from typing import TypeVar

from tidegate.base.request import SamplingParams
from tidegate.server.context import Context
from tidegate.server.errors import bad_request
from tidegate.server.protocol import GenerationRequest

T = TypeVar("T")

_SEED_MASK = (1 << 63) - 1
_MAX_STOP_STRINGS = 64


def sampling_params(context: Context, request: GenerationRequest, logprobs: int | None) -> SamplingParams:
    """For the first choice. ``logprobs``: as in SamplingParams. Raises a 400 for values that don't go together."""
    defaults = context.settings.sampling_defaults
    if logprobs is not None and logprobs > context.settings.max_logprobs:
        raise bad_request(f"'logprobs' can be at most {context.settings.max_logprobs}.", "logprobs")
    if any(not string for string in request.stop_strings) or len(request.stop_strings) > _MAX_STOP_STRINGS:
        raise bad_request(f"'stop' takes up to {_MAX_STOP_STRINGS} strings, none of them empty.", "stop")
    for param, ids in (("stop_token_ids", request.stop_token_ids or ()), ("logit_bias", request.logit_bias or {})):
        if any(not 0 <= token < context.engine.info.model.vocab_size for token in ids):
            raise bad_request(f"'{param}' has a token id outside of the vocabulary.", param)
    ends = () if request.ignore_eos else context.eos_ids
    seed = secrets.randbits(63) if request.seed is None else request.seed & _SEED_MASK
    return SamplingParams(
        temperature=_given(request.temperature, defaults.temperature),
        top_p=_given(request.top_p, defaults.top_p),
        top_k=max(0, _given(request.top_k, defaults.top_k)),
        min_p=_given(request.min_p, defaults.min_p),
        presence_penalty=_given(request.presence_penalty, defaults.presence_penalty),
        frequency_penalty=_given(request.frequency_penalty, defaults.frequency_penalty),
        repetition_penalty=_given(request.repetition_penalty, defaults.repetition_penalty),
        seed=seed,
        logit_bias=request.logit_bias or {},
        logprobs=logprobs,
        min_tokens=request.min_tokens or 0,
        stop_token_ids=tuple(dict.fromkeys((*ends, *(request.stop_token_ids or ())))),
    )


def next_seed(seed: int, i: int) -> int:
    """The seed of choice ``i``, so that the choices of one prompt differ and each repeats."""
    return (seed + i) & _SEED_MASK


def token_limit(context: Context, prompt_tokens: int, asked: int | None, default: int | None, param: str) -> int:
    """How many tokens to generate at most: ``asked``, or else ``default`` or what is left of the context.

    Raises a 400 if the prompt and what was asked for exceed the context.
    """
    longest = context.engine.info.max_model_len
    left = longest - prompt_tokens
    if left < 1 or (asked is not None and asked > left):
        wanted = f"{prompt_tokens + (asked or 1)} tokens ({prompt_tokens} in the {param}, {asked or 1} to generate)"
        raise bad_request(
            f"This model's maximum context length is {longest} tokens, but you asked for {wanted}: "
            f"send a shorter prompt or a smaller 'max_tokens'.",
            param,
            "context_length_exceeded",
        )
    if asked is not None:
        return asked
    return left if default is None else min(default, left)


def check_choices(context: Context, request: GenerationRequest, prompts: int) -> int:
    """The number of choices for each prompt. Raises a 400 if there would be too many in all."""
    n = request.n or 1
    if request.best_of is not None and request.best_of != n:
        raise bad_request(
            "'best_of' other than 'n' is not supported: leave it out.", "best_of", "unsupported_parameter"
        )
    if prompts * n > context.settings.max_choices:
        raise bad_request(f"At most {context.settings.max_choices} choices can be asked for in one request.", "n")
    return n


def _given(value: T | None, default: T) -> T:
    return default if value is None else value
