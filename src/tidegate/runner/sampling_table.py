"""How to sample for each slot: parameters as arrays indexed by slot, so that a step's are one gather."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from tidegate.base.batch import SlotSetup

GREEDY_BELOW = 1e-5  # temperatures below this are greedy, as in vLLM

_FIELDS = np.dtype(
    [
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("repetition_penalty", np.float64),
        ("presence_penalty", np.float64),
        ("frequency_penalty", np.float64),
        ("seed", np.uint64),
        ("prompt_len", np.int64),
        ("barred_until", np.int64),  # the first position that may hold a stop token
        ("num_logprobs", np.int64),
        ("random", np.bool_),
        ("penalised", np.bool_),
        ("biased", np.bool_),
        ("wants_logprobs", np.bool_),
    ]
)

Params = NDArray[np.void]  # records of the fields above, one a row of a step
TokenIds = NDArray[np.int64]


class SamplingTable:
    """Belongs to one lane, and holds only what ``SlotSetup`` records say: a new lane is sent them again.

    ``bias[slot]`` has the ids and added logits of slots with a logit bias, ``stops[slot]`` the ids that min_tokens
    bars. Ids outside the vocabulary name no token and are left out.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.bias: dict[int, tuple[TokenIds, NDArray[np.float64]]] = {}
        self.stops: dict[int, TokenIds] = {}
        self._params: Params = np.zeros(max_num_seqs, dtype=_FIELDS)

    def apply(self, setups: Iterable[SlotSetup]) -> None:
        """Later setups replace earlier ones of the same slot."""
        for setup in setups:
            self._set(setup)

    def gather(self, slots: list[int]) -> Params:
        return self._params[slots]

    def _set(self, setup: SlotSetup) -> None:
        wanted = setup.sampling
        bias = {token: added for token, added in wanted.logit_bias.items() if 0 <= token < self.vocab_size}
        stops = [token for token in wanted.stop_token_ids if 0 <= token < self.vocab_size]
        self._params[setup.slot] = (
            wanted.temperature,
            wanted.top_k,
            wanted.top_p,
            wanted.min_p,
            wanted.repetition_penalty,
            wanted.presence_penalty,
            wanted.frequency_penalty,
            wanted.seed % 2**64,
            setup.prompt_len,
            setup.prompt_len + wanted.min_tokens if stops else 0,
            wanted.logprobs or 0,
            wanted.temperature >= GREEDY_BELOW,
            wanted.needs_history,
            bool(bias),
            wanted.logprobs is not None,
        )
        self.bias[setup.slot] = (np.array(list(bias), dtype=np.int64), np.array(list(bias.values()), dtype=np.float64))
        self.stops[setup.slot] = np.array(stops, dtype=np.int64)
