"""From logits to one token a row, in vLLM's order: logit bias, min_tokens, penalties; then the best token, or
temperature, min-p, top-k, top-p and a draw.

A token is a function of (logits, parameters, request seed, position) alone. Every step works on all rows at once,
and only rows that ask for a feature pay for it: where all are plainly greedy, only an argmax is computed. On a GPU
nothing here waits for the device: steps are enqueued ahead of it.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tidegate.base.batch import SlotSetup
from tidegate.base.request import TokenLogprob
from tidegate.kernels.host_copies import to_device, to_host
from tidegate.runner.adjust import add_bias, bar, penalise
from tidegate.runner.draw import draw
from tidegate.runner.logprobs import RowLogprobs, describe
from tidegate.runner.sampling_table import Params, SamplingTable


class Sampled(NamedTuple):
    """``tokens`` int64 [N], and the log-probabilities of the rows in ``logprob_rows``, which asked; on the device
    until ``to_host``."""

    tokens: torch.Tensor
    logprob_rows: list[int]
    logprobs: RowLogprobs | None

    def to_host(self) -> "Sampled":
        """The same on the host, to be read once the current stream has got to here."""
        logprobs = self.logprobs.to_host() if self.logprobs is not None else None
        return Sampled(to_host(self.tokens), self.logprob_rows, logprobs)

    def logprob_records(self) -> list[TokenLogprob | None] | None:
        """One a row, None for those that did not ask; None where no row did."""
        if self.logprobs is None:
            return None
        records: list[TokenLogprob | None] = [None] * len(self.tokens)
        for row, record in zip(self.logprob_rows, self.logprobs.to_records(), strict=True):
            records[row] = record
        return records


class Sampler:
    """``token_store`` int32 [max_num_seqs, max_model_len + 1] is only read, and only for rows with penalties."""

    def __init__(self, token_store: torch.Tensor, vocab_size: int) -> None:
        self._tokens = token_store
        self._table = SamplingTable(token_store.shape[0], vocab_size)

    def apply(self, setups: Iterable[SlotSetup]) -> None:
        self._table.apply(setups)

    def plain(self, slots: list[int], positions: list[int]) -> bool:
        """Whether every row's token is just the best one of the raw logits, and nothing else is asked for."""
        params, where = self._table.gather(slots), np.array(positions, dtype=np.int64)
        asked = params["random"] | params["penalised"] | params["biased"] | params["wants_logprobs"]
        return not (asked | (where < params["barred_until"])).any()

    def sample(self, logits: torch.Tensor, slots: list[int], positions: list[int]) -> Sampled:
        """Chooses for each row of ``logits`` float32 [N, V], N > 0, the token of request ``slots[i]`` that will be at
        ``positions[i]``. Overwrites ``logits``."""
        params, where = self._table.gather(slots), np.array(positions, dtype=np.int64)
        asking = np.flatnonzero(params["wants_logprobs"])
        raw = logits[to_device(asking, logits.device)].log_softmax(-1) if asking.size else None
        self._adjust(logits, slots, params, where)
        tokens = logits.argmax(-1)  # the lowest id where several are best
        random = np.flatnonzero(params["random"])
        if random.size:
            rows = to_device(random, logits.device)
            tokens[rows] = draw(logits[rows], params[random], where[random])
        if raw is None:
            return Sampled(tokens, [], None)
        counts = params["num_logprobs"][asking].tolist()
        return Sampled(tokens, asking.tolist(), describe(raw, tokens[to_device(asking, logits.device)], counts))

    def _adjust(self, logits: torch.Tensor, slots: list[int], params: Params, positions: NDArray[np.int64]) -> None:
        biased = np.flatnonzero(params["biased"])
        if biased.size:
            add_bias(logits, biased, [self._table.bias[slots[row]] for row in biased])
        early = np.flatnonzero(positions < params["barred_until"])
        if early.size:
            bar(logits, early, [self._table.stops[slots[row]] for row in early])
        penalised = np.flatnonzero(params["penalised"])
        if penalised.size:
            lengths = positions[penalised]
            history = self._tokens[to_device(np.array(slots)[penalised], logits.device), : int(lengths.max())]
            penalise(logits, penalised, params[penalised], history, to_device(lengths, logits.device))
