"""POST /tokenize and /detokenize"""

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from tidegate.server.body import read_json
from tidegate.server.context import Context
from tidegate.server.errors import bad_request
from tidegate.server.logprobs import token_text
from tidegate.server.prompts import encode, render
from tidegate.server.protocol import ChatRequest, DetokenizeRequest, TokenizeRequest, parse


def token_routes(context: Context) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """A text or a conversation to token ids, as the completion endpoints would do it."""
        asked = parse(await read_json(request, context.settings.max_body_bytes), TokenizeRequest)
        context.model_name(asked.model)
        tokenizer = context.needs_tokenizer("prompt")
        if (asked.prompt is None) == (asked.messages is None):
            raise bad_request("Send either 'prompt' or 'messages'.", "prompt")
        text, add_special_tokens = asked.prompt, asked.add_special_tokens is not False
        if asked.messages is not None:
            text = render(
                tokenizer,
                ChatRequest(
                    messages=asked.messages,
                    add_generation_prompt=asked.add_generation_prompt,
                    continue_final_message=asked.continue_final_message,
                    chat_template_kwargs=asked.chat_template_kwargs,
                ),
            )
            add_special_tokens = bool(asked.add_special_tokens)
        tokens = await encode(tokenizer, text or "", add_special_tokens)
        return JSONResponse(
            {
                "count": len(tokens),
                "max_model_len": context.engine.info.max_model_len,
                "tokens": tokens,
                "token_strs": [token_text(tokenizer, t) for t in tokens] if asked.return_token_strs else None,
            }
        )

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """Token ids to text, special tokens included."""
        asked = parse(await read_json(request, context.settings.max_body_bytes), DetokenizeRequest)
        context.model_name(asked.model)
        tokenizer = context.needs_tokenizer("tokens")
        vocabulary = context.engine.info.model.vocab_size
        if any(token >= vocabulary for token in asked.tokens):
            raise bad_request(f"'tokens' has an id outside of the vocabulary: ids are 0 to {vocabulary - 1}.", "tokens")
        return JSONResponse({"prompt": tokenizer.decode(asked.tokens, skip_special_tokens=False)})

    return router
