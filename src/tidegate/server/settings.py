"""What the operator of a server chooses."""

import msgspec

from tidegate.base.request import SamplingParams
from tidegate.slo.goodput import Slo


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``model_names``: the names under which the one model is served; answers carry the name asked for.

    ``api_keys`` guard /v1/* (none: open). ``admin_key`` guards /admin/* and /reset_prefix_cache; without one, only
    clients on this machine may use them. ``sampling_defaults`` apply where a request is silent. ``slo``: what the
    engine starts with.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    admin_key: str | None = None
    max_body_bytes: int = 32 << 20
    max_choices: int = 128  # sequences that one HTTP request may ask for: prompts times n
    max_logprobs: int = 20
    sampling_defaults: SamplingParams = SamplingParams(temperature=1.0)
    slo: Slo | None = None
