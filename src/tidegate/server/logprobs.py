"""Log-probabilities in the two shapes that OpenAI's API gives them."""

from collections.abc import Sequence
from typing import Any

from tidegate.base.request import TokenLogprob
from tidegate.server.generation import Delta
from tidegate.server.tokenizer import Tokenizer


def token_text(tokenizer: Tokenizer | None, token: int) -> str:
    """The token by itself. Where its bytes are not whole characters, they are spelled out, so that texts differ."""
    if tokenizer is None:
        return f"token_id:{token}"
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(tokenizer: Tokenizer | None, deltas: Sequence[Delta]) -> dict[str, Any]:
    """``{"content": [{"token", "bytes", "logprob", "top_logprobs": [...]}]}``, one entry a token."""
    content = []
    for delta in deltas:
        if delta.token is None or delta.logprob is None:
            continue
        entry = _entry(tokenizer, delta.token, delta.logprob.chosen)
        best = zip(delta.logprob.top_ids, delta.logprob.top_logprobs, strict=True)
        entry["top_logprobs"] = [_entry(tokenizer, token, logprob) for token, logprob in best]
        content.append(entry)
    return {"content": content}


def completion_logprobs(tokenizer: Tokenizer | None, deltas: Sequence[Delta]) -> dict[str, Any]:
    """``{"tokens", "token_logprobs", "top_logprobs", "text_offset"}``: lists of one entry a token.

    ``top_logprobs`` always has the chosen token too, so up to one more than was asked for.
    """
    told = [(d.token, d.logprob, d.offset) for d in deltas if d.token is not None and d.logprob is not None]
    return {
        "tokens": [token_text(tokenizer, token) for token, _, _ in told],
        "token_logprobs": [logprob.chosen for _, logprob, _ in told],
        "top_logprobs": [_best(tokenizer, token, logprob) for token, logprob, _ in told],
        "text_offset": [offset for _, _, offset in told],
    }


def _best(tokenizer: Tokenizer | None, token: int, logprob: TokenLogprob) -> dict[str, float]:
    best = {
        token_text(tokenizer, other): value for other, value in zip(logprob.top_ids, logprob.top_logprobs, strict=True)
    }
    return best | {token_text(tokenizer, token): logprob.chosen}


def _entry(tokenizer: Tokenizer | None, token: int, logprob: float) -> dict[str, Any]:
    raw = list(tokenizer.token_bytes(token)) if tokenizer else None
    return {"token": token_text(tokenizer, token), "bytes": raw, "logprob": logprob}
