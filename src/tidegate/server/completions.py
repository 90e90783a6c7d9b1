"""POST /v1/completions"""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tidegate.base.clock import now_s
from tidegate.server.answer import Answer, AnswerHead, AnswerOptions
from tidegate.server.body import read_json
from tidegate.server.context import Context
from tidegate.server.errors import bad_request
from tidegate.server.generation import Delta
from tidegate.server.logprobs import completion_logprobs
from tidegate.server.plan import SLO_HEADER, answer_head, answer_options, delivery, plan_choices
from tidegate.server.prompts import completion_prompts
from tidegate.server.protocol import CompletionRequest, parse, refuse_unsupported
from tidegate.server.respond import GenerationResponse
from tidegate.server.tokenizer import Tokenizer

_DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionAnswer(Answer):
    event_object = whole_object = "text_completion"
    before_text = b'"text":'
    after_text = b""

    def __init__(self, head: AnswerHead, options: AnswerOptions, tokenizer: Tokenizer | None) -> None:
        super().__init__(head, options)
        self._tokenizer = tokenizer

    def content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def logprobs(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        return completion_logprobs(self._tokenizer, deltas)


def completion_routes(context: Context) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        arrived = now_s()
        body = await read_json(request, context.settings.max_body_bytes)
        refuse_unsupported(body)
        asked = parse(body, CompletionRequest)
        model = context.model_name(asked.model)
        options = answer_options(asked, asked.logprobs is not None)
        if asked.echo and asked.logprobs is not None:
            raise bad_request("'echo' together with 'logprobs' is not supported: prompts are not scored.", "echo")
        prompts = await completion_prompts(context, asked.prompt, asked.add_special_tokens is not False)
        choices = plan_choices(
            context,
            asked,
            prompts,
            arrived=arrived,
            slo=request.headers.get(SLO_HEADER),
            prompt_param="prompt",
            max_tokens=asked.max_tokens,
            default_max_tokens=_DEFAULT_MAX_TOKENS,
            logprobs=asked.logprobs,
            echoes=_echoes(context, asked.prompt, prompts) if asked.echo else None,
        )
        head = answer_head("cmpl", request.state.request_id, model)
        answer = CompletionAnswer(head, options, context.tokenizer)
        return GenerationResponse(context.engine, choices, answer, delivery(asked, options))

    return router


def _echoes(context: Context, asked: str | list[str | int | list[int]], prompts: Sequence[Sequence[int]]) -> list[str]:
    """The text of each prompt: as it was sent, or decoded where it was sent as token ids."""
    given = [asked] if isinstance(asked, str) else asked
    tokenizer = context.tokenizer
    return [
        text if isinstance(text, str) else (tokenizer.decode(prompt) if tokenizer else "")
        for text, prompt in zip(given, prompts, strict=False)
    ]
