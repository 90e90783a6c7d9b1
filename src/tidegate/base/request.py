"""What a user asks for, as the core sees it: token ids in, sampling parameters, limits."""

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to choose each next token. Names and meanings are OpenAI's and vLLM's.

    ``temperature`` 0 is greedy. ``seed`` is always set by whoever creates the request: a token is a
    function of (logits, params, seed, position), so a request repeats alone, in a crowd, and after a restart.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None  # None: none; n: the chosen token's and the n best
    min_tokens: int = 0  # end-of-sequence and stop ids are barred until so many tokens are out
    stop_token_ids: tuple[int, ...] = ()  # all ids that end the request, end-of-sequence included

    @property
    def needs_history(self) -> bool:
        """Whether the choice depends on the tokens so far."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


class RequestSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sequence to generate. ``id`` is unique for the life of the engine."""

    id: str
    prompt: list[int]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    priority: int = 0  # lower is served first
    cache_salt: str = ""  # requests share cached prefixes only under equal salts
    ttft_s: float | None = None  # its own SLO: seconds to its first token; None: the engine's
    tpot_s: float | None = None  # the same for each next token


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities (natural, of the raw logits) at one generated position."""

    chosen: float
    rank: int  # of the chosen token, 1 is the best
    top_ids: list[int]
    top_logprobs: list[float]


class Output(msgspec.Struct, array_like=True):
    """News of one request. Exactly one Output of a request has ``finish`` set, and it is the last.

    ``finish``: "stop" (an end or stop id, which is the last of ``tokens``), "length", "abort", "error",
    "rejected" (queue full, or the wait too long: nothing was done), "invalid" (can never be served); ``reason``
    explains the last three.
    """

    id: str
    tokens: list[int]
    finish: str | None = None
    reason: str = ""
    logprobs: list[TokenLogprob] | None = None  # one a token, where asked for
    cached_tokens: int = 0  # prompt tokens whose KV was found in the prefix cache (set on the first Output)
    retry_after_s: float | None = None  # of a "rejected" one: when to try again, as far as that is known
