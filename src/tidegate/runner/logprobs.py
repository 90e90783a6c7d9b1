"""Log-probabilities of the raw logits, for the rows that ask."""

from typing import NamedTuple

import torch

from tidegate.base.request import TokenLogprob
from tidegate.kernels.host_copies import to_host


class RowLogprobs(NamedTuple):
    """Of R rows. ``counts[r]`` of the K best are wanted by row r."""

    chosen: torch.Tensor  # float32 [R]
    ranks: torch.Tensor  # int64 [R]
    top_ids: torch.Tensor  # int64 [R, K]
    top: torch.Tensor  # float32 [R, K], descending
    counts: list[int]

    def to_host(self) -> "RowLogprobs":
        """See ``kernels.host_copies.to_host``."""
        return RowLogprobs(
            to_host(self.chosen), to_host(self.ranks), to_host(self.top_ids), to_host(self.top), self.counts
        )

    def to_records(self) -> list[TokenLogprob]:
        chosen, ranks = self.chosen.tolist(), self.ranks.tolist()
        top_ids, top = self.top_ids.tolist(), self.top.tolist()
        return [
            TokenLogprob(chosen[row], ranks[row], top_ids[row][:count], top[row][:count])
            for row, count in enumerate(self.counts)
        ]


def describe(logprobs: torch.Tensor, tokens: torch.Tensor, counts: list[int]) -> RowLogprobs:
    """Looks up ``tokens`` int64 [R] in ``logprobs`` float32 [R, V]. A rank is 1 plus the number of better tokens."""
    chosen = logprobs.gather(1, tokens.unsqueeze(-1))
    ranks = (logprobs > chosen).sum(-1) + 1
    top = logprobs.topk(min(max(counts), logprobs.shape[1]))
    return RowLogprobs(chosen.squeeze(-1), ranks, top.indices, top.values, counts)
