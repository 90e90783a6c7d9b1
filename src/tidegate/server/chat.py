"""POST /v1/chat/completions"""

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from tidegate.base.clock import now_s
from tidegate.server.answer import Answer, AnswerHead, AnswerOptions
from tidegate.server.body import read_json
from tidegate.server.context import Context
from tidegate.server.errors import bad_request
from tidegate.server.generation import Choice, Delta
from tidegate.server.logprobs import chat_logprobs
from tidegate.server.plan import SLO_HEADER, answer_head, answer_options, delivery, plan_choices
from tidegate.server.prompts import chat_prompt
from tidegate.server.protocol import ChatRequest, parse, refuse_unsupported
from tidegate.server.respond import GenerationResponse
from tidegate.server.tokenizer import Tokenizer


class ChatAnswer(Answer):
    event_object = "chat.completion.chunk"
    whole_object = "chat.completion"
    before_text = b'"delta":{"content":'
    after_text = b"}"

    def __init__(self, head: AnswerHead, options: AnswerOptions, tokenizer: Tokenizer | None) -> None:
        super().__init__(head, options)
        self._tokenizer = tokenizer

    def opening(self, choice: Choice) -> bytes:
        return self._event_head + (
            b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null' % choice.index
            + (b',"prompt_token_ids":' + msgspec.json.encode(choice.spec.prompt) if self.options.token_ids else b"")
            + self._tail
        )

    def content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        return chat_logprobs(self._tokenizer, deltas)


def chat_routes(context: Context) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        arrived = now_s()
        body = await read_json(request, context.settings.max_body_bytes)
        refuse_unsupported(body)
        asked = parse(body, ChatRequest)
        model = context.model_name(asked.model)
        options = answer_options(asked, bool(asked.logprobs))
        logprobs = _logprobs(asked)
        prompt = await chat_prompt(context, asked, bool(asked.add_special_tokens))
        choices = plan_choices(
            context,
            asked,
            [prompt],
            arrived=arrived,
            slo=request.headers.get(SLO_HEADER),
            prompt_param="messages",
            max_tokens=asked.max_completion_tokens or asked.max_tokens,
            default_max_tokens=None,
            logprobs=logprobs,
        )
        head = answer_head("chatcmpl", request.state.request_id, model)
        answer = ChatAnswer(head, options, context.tokenizer)
        return GenerationResponse(context.engine, choices, answer, delivery(asked, options))

    return router


def _logprobs(asked: ChatRequest) -> int | None:
    if asked.logprobs:
        return asked.top_logprobs or 0
    if asked.top_logprobs:
        raise bad_request("'top_logprobs' needs 'logprobs': set it to true.", "top_logprobs")
    return None
