"""The bodies of requests: OpenAI's names, and vLLM's for what OpenAI does not have.

A body is read in two steps. Fields that would change the answer but can't be served here are refused, by
``REFUSED``; then the rest is checked against a record. Fields that only inform (``user``, ``metadata``) or that are
unknown are ignored, as OpenAI's and vLLM's servers do.
"""

import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from tidegate.server.errors import bad_request

T = TypeVar("T")

Penalty = Annotated[float, Meta(ge=-2, le=2)]
NonNegative = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What both ways of generating share. None means: not given."""

    model: str | None = None
    max_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    n: Positive | None = None
    best_of: Positive | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[NonNegative] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: NonNegative | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)] | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: NonNegative | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    messages: list[dict[str, Any]]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: NonNegative | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[NonNegative]


class SharesRequest(msgspec.Struct, kw_only=True):
    """Parts of the compute while both phases run; together 1. Decode has the rest unless it says so."""

    prefill: Annotated[float, Meta(gt=0, lt=1)]
    decode: Annotated[float, Meta(gt=0, lt=1)] | None = None


class SettingsRequest(msgspec.Struct, kw_only=True):
    """Settings to change while serving; what is absent stays. Names as in ``tidegate serve``."""

    max_num_batched_tokens: Annotated[int, Meta(ge=1)] | None = None
    slice_ms: Annotated[float, Meta(gt=0)] | None = None
    order: str | None = None
    gate: str | None = None
    slo: str | None = None  # "ttft=500ms,tpot=25ms"
    slo_metric: str | None = None


class ModeRequest(msgspec.Struct, kw_only=True):
    mode: str


# Fields that are refused unless they have one of these values (besides null and being absent).
REFUSED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "suffix": ("",),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "structural_tag": (),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
    "thinking_token_budget": (),
    "documents": ([],),
    "chat_template": (),
    "kv_transfer_params": (),
    "mm_processor_kwargs": ({},),
}


def refuse_unsupported(body: dict[str, Any]) -> None:
    """Raises a 400 for a field whose wish can't be met: ignoring it would give another answer than asked for."""
    if body.get("tool_choice") == "none":  # tools that may not be called change nothing
        body = body | {"tools": None}
    for name in body.keys() & REFUSED.keys():
        value = body[name]
        if value is not None and value not in REFUSED[name]:
            raise bad_request(
                f"'{name}' is not supported by this server: leave it out, or send the request to one that has it.",
                name,
                "unsupported_parameter",
            )


def parse(body: dict[str, Any], kind: type[T]) -> T:
    """``body`` as a ``kind``; raises a 400 that names the field at fault."""
    try:
        return msgspec.convert(body, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None


def _invalid(complaint: str) -> Exception:
    """msgspec says what is wrong, and where after "at": `$.logit_bias[...]`, or `key` in `$.logit_bias`."""
    what, _, where = complaint.partition(" - at ")
    missing = re.fullmatch(r"Object missing required field `(\w+)`", what)
    if missing:
        return bad_request(f"The field '{missing[1]}' is missing.", missing[1], "missing_field")
    param = where.partition("`$")[2].strip("`.") or None
    field = f"'{param}' is not valid" if param else "The body is not valid"
    expected = what[:1].lower() + what[1:].replace("`", "").replace(" | null", "")
    return bad_request(f"{field}: {expected}.", param, "invalid_value")
