"""From what a request says to the token ids of its prompt."""

import asyncio
from typing import Any

from tidegate.base.errors import RequestError
from tidegate.server.context import Context
from tidegate.server.errors import bad_request
from tidegate.server.protocol import ChatRequest
from tidegate.server.tokenizer import Tokenizer

_LONG_CHARS = 8192  # a text that takes longer to encode than other requests should wait


async def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Encodes a long text on another thread: the event loop goes on with its streams."""
    if len(text) < _LONG_CHARS:
        return tokenizer.encode(text, add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)


async def completion_prompts(
    context: Context, prompt: str | list[str | int | list[int]], add_special_tokens: bool
) -> list[list[int]]:
    """OpenAI's four forms: a text, texts, token ids, lists of token ids. Raises a 400 for any other."""
    if isinstance(prompt, str):
        prompt = [prompt]
    token_ids = [part for part in prompt if isinstance(part, int)]
    if token_ids and len(token_ids) == len(prompt):
        return [_checked(context, token_ids, "prompt")]
    if token_ids:
        raise bad_request("'prompt' mixes token ids with texts or lists: send one kind.", "prompt")
    if not prompt:
        raise bad_request("'prompt' is empty: send at least one prompt.", "prompt")
    prompts = []
    for part in prompt:
        if isinstance(part, str):
            part = await encode(context.needs_tokenizer("prompt"), part, add_special_tokens)
        assert not isinstance(part, int), "a list with token ids was handled above"
        prompts.append(_checked(context, part, "prompt"))
    return prompts


async def chat_prompt(context: Context, request: ChatRequest, add_special_tokens: bool) -> list[int]:
    """The conversation as the model's template writes it. Raises a 400 for messages that are not text."""
    tokenizer = context.needs_tokenizer("messages")
    text = render(tokenizer, request)
    return _checked(context, await encode(tokenizer, text, add_special_tokens), "messages")


def render(tokenizer: Tokenizer, request: ChatRequest) -> str:
    open_ended = request.continue_final_message or False
    if open_ended and request.add_generation_prompt:
        raise bad_request(
            "'continue_final_message' goes on with the last message and 'add_generation_prompt' begins a new one: "
            "set only one of them.",
            "continue_final_message",
        )
    if not request.messages:
        raise bad_request("'messages' is empty: send at least one message.", "messages")
    messages = [_as_text(message, f"messages[{i}]") for i, message in enumerate(request.messages)]
    variables = dict(request.chat_template_kwargs or {})
    for name in ("messages", "add_generation_prompt", "continue_final_message"):
        if name in variables:
            raise bad_request(f"'chat_template_kwargs' can't set '{name}'.", "chat_template_kwargs")
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    generation_prompt = request.add_generation_prompt
    try:
        return tokenizer.render_chat(
            messages,
            add_generation_prompt=not open_ended if generation_prompt is None else generation_prompt,
            continue_final_message=open_ended,
            variables=variables,
        )
    except RequestError as error:
        raise bad_request(str(error), "messages") from None


def _as_text(message: dict[str, Any], where: str) -> dict[str, Any]:
    """``message`` with its content as one string: text parts are joined by line ends."""
    if not isinstance(message.get("role"), str):
        raise bad_request(f"'{where}.role' must be a string, such as 'user'.", f"{where}.role")
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    if not isinstance(content, str):
        raise bad_request(f"'{where}.content' must be a string or a list of text parts.", f"{where}.content")
    return message | {"content": content}


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, dict) and part.get("type") in ("text", "refusal", "input_text"):
        text = part.get("refusal" if part["type"] == "refusal" else "text")
        if isinstance(text, str):
            return text
    raise bad_request(
        f"'{where}' must be a text part like {{'type': 'text', 'text': '...'}}: only text is read.", where
    )


def _checked(context: Context, prompt: list[int], param: str) -> list[int]:
    if not prompt:
        raise bad_request(f"'{param}' has no tokens: send some text or token ids.", param)
    vocabulary = context.engine.info.model.vocab_size
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        raise bad_request(f"'{param}' has a token id outside of the vocabulary: ids are 0 to {vocabulary - 1}.", param)
    return prompt
