"""From a checked request to the choices that answer it."""

import uuid
from collections.abc import Sequence

import msgspec

from tidegate.base.clock import wall_s
from tidegate.base.errors import ConfigError
from tidegate.base.request import RequestSpec
from tidegate.server.answer import AnswerHead, AnswerOptions
from tidegate.server.context import Context
from tidegate.server.errors import bad_request
from tidegate.server.generation import Choice
from tidegate.server.protocol import GenerationRequest
from tidegate.server.respond import Delivery
from tidegate.server.sampling import check_choices, next_seed, sampling_params, token_limit
from tidegate.server.times import RequestTimes
from tidegate.slo.parse import parse_limits

SLO_HEADER = "X-SLO"  # "ttft=500ms,tpot=25ms", or one of the two: a request's own SLO


def plan_choices(
    context: Context,
    request: GenerationRequest,
    prompts: Sequence[list[int]],
    *,
    arrived: float,
    prompt_param: str,
    max_tokens: int | None,
    default_max_tokens: int | None,
    logprobs: int | None,
    slo: str | None = None,
    echoes: Sequence[str] | None = None,
) -> list[Choice]:
    """``n`` choices for each prompt, in the order in which OpenAI numbers them.

    ``arrived``: when the request came, from ``now_s``. ``slo``: its own one, as in ``SLO_HEADER``. ``echoes``:
    text to put before each prompt's choices.
    Raises a 400 for limits that can't be kept.
    """
    n = check_choices(context, request, len(prompts))
    try:
        limits = parse_limits(slo) if slo else {}
    except ConfigError as error:
        raise bad_request(str(error), SLO_HEADER) from None
    sampling = sampling_params(context, request, logprobs)
    unique = uuid.uuid4().hex
    choices: list[Choice] = []
    for p, prompt in enumerate(prompts):
        limit = token_limit(context, len(prompt), max_tokens, default_max_tokens, prompt_param)
        if sampling.min_tokens > limit:
            raise bad_request(f"'min_tokens' is {sampling.min_tokens}, more than the limit of {limit}.", "min_tokens")
        for i in range(n):
            spec = RequestSpec(
                id=f"{unique}-{len(choices)}",
                prompt=prompt,
                max_tokens=limit,
                sampling=msgspec.structs.replace(sampling, seed=next_seed(sampling.seed, i)),
                priority=request.priority or 0,
                cache_salt=request.cache_salt or "",
                ttft_s=limits.get("ttft"),
                tpot_s=limits.get("tpot"),
            )
            choices.append(
                Choice(
                    len(choices),
                    spec,
                    context.detokenizer(prompt, request.skip_special_tokens is not False),
                    RequestTimes(context.metrics, arrived, spec),
                    stop_strings=request.stop_strings,
                    keep_stop=bool(request.include_stop_str_in_output),
                    eos_ids=context.eos_ids,
                    echo=echoes[p] if echoes else "",
                )
            )
    return choices


def answer_head(prefix: str, request_id: str, model: str) -> AnswerHead:
    return AnswerHead(f"{prefix}-{request_id}", int(wall_s()), model)


def answer_options(request: GenerationRequest, logprobs: bool) -> AnswerOptions:
    wanted = request.stream_options
    if wanted is not None and not request.stream:
        raise bad_request("'stream_options' is only for streams: set 'stream' to true.", "stream_options")
    total = wanted is not None and bool(wanted.include_usage)
    each = total and wanted is not None and bool(wanted.continuous_usage_stats)
    return AnswerOptions(logprobs, bool(request.return_token_ids), usage_field=total, usage_each=each)


def delivery(request: GenerationRequest, options: AnswerOptions) -> Delivery:
    return Delivery(request.n or 1, bool(request.stream), usage_event=options.usage_field)
