"""Which requests are sent: their lengths, and for a trace also their times and shared prefixes.

The built-in workloads are distributions of prompt and output lengths, drawn independently:

``conv`` and ``code`` are fitted to the Azure LLM inference trace 2023 (AzurePublicDataset, CC-BY 4.0; its inputs and
outputs are uncorrelated: |r| < 0.12). They are quantile functions, log-linear between the knots, because those lengths
gather at a few values. Fit (data / fitted):

    ============  =============  ============  ============  ============  ============  ===============
                  mean           p25           p50           p75           p90           largest error
                                                                                         of the CDF
    conv  input   1155 / 1150    396 / 396     1020 / 1020   1189 / 1206   2734 / 2726   0.019
    conv  output  211.1 / 211.7  85 / 85       129 / 131     395 / 395     424 / 424     0.013
    code  input   2048 / 2058    578 / 575     1469 / 1471   2744 / 2760   5188 / 5164   0.013
    code  output  27.9 / 28.1    9 / 9         13 / 13       24 / 24       55 / 56       0.005
    ============  =============  ============  ============  ============  ============  ===============

``chat`` (short questions: means 314 in, 228 out) and ``long`` (long prompts with chatty answers: 5777 in, 238 out) are
clipped lognormals, as are ``neutral-conv`` and ``neutral-code``: plainer shapes of the same two traces.
"""

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec

BLOCK_TOKENS = 512  # that one block id of a trace stands for


class Request(msgspec.Struct, frozen=True):
    """``at_s``: seconds after the start, in a trace. ``blocks``: ids of the prompt's blocks of ``BLOCK_TOKENS`` each:
    prompts begin alike as far as their ids are equal. Without ids a prompt is like no other."""

    prompt_tokens: int
    output_tokens: int
    at_s: float | None = None
    blocks: tuple[int, ...] = ()


class Lengths(Protocol):
    """A distribution of positive whole numbers."""

    def draw(self, rng: random.Random) -> int: ...


class Lognormal(NamedTuple):
    """exp(N(mu, sigma)), rounded down and clipped to ``low`` to ``high``."""

    mu: float
    sigma: float
    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return max(self.low, min(self.high, int(rng.lognormvariate(self.mu, self.sigma))))


class Quantiles(NamedTuple):
    """A quantile function through ``knots`` (share of lengths below, length), log-linear between them."""

    knots: Sequence[tuple[float, int]]

    def draw(self, rng: random.Random) -> int:
        share = rng.random()
        after = bisect_right(self.knots, share, key=lambda knot: knot[0])
        (left, low), (right, high) = self.knots[after - 1], self.knots[after]
        return int(low * (high / low) ** ((share - left) / (right - left)))


class Fixed(NamedTuple):
    length: int

    def draw(self, rng: random.Random) -> int:
        return self.length


class Workload(NamedTuple):
    """Prompts and outputs whose lengths are drawn in turns from one source of randomness."""

    prompt: Lengths
    output: Lengths

    def requests(self, rng: random.Random) -> Iterator[Request]:
        while True:
            prompt_tokens = self.prompt.draw(rng)
            yield Request(prompt_tokens, self.output.draw(rng))


WORKLOADS = {
    "conv": Workload(
        Quantiles(
            [(0.0, 2), (0.036, 181), (0.118, 219), (0.145, 370), (0.213, 391), (0.339, 411), (0.385, 441), (0.432, 955),
             (0.479, 1009), (0.724, 1152), (0.819, 1360), (0.902, 2767), (0.917, 4070), (0.979, 4096), (0.992, 4166),
             (0.999, 6000), (1.0, 14051)]
        ),
        Quantiles(
            [(0.0, 7), (0.022, 27), (0.071, 48), (0.201, 78), (0.254, 86), (0.392, 102), (0.44, 111), (0.588, 168),
             (0.654, 218), (0.671, 373), (0.728, 393), (0.793, 399), (0.924, 430), (0.95, 452), (0.99, 601),
             (0.994, 627), (1.0, 1001)]
        ),
    ),
    "code": Workload(
        Quantiles(
            [(0.0, 3), (0.002, 10), (0.029, 50), (0.096, 143), (0.222, 480), (0.289, 742), (0.328, 875), (0.524, 1583),
             (0.783, 2991), (0.838, 3661), (0.87, 4400), (0.893, 4870), (0.922, 6150), (0.951, 7373), (0.961, 7433),
             (1.0, 7438)]
        ),
        Quantiles(
            [(0.0, 6), (0.154, 8), (0.211, 9), (0.303, 10), (0.415, 12), (0.52, 14), (0.625, 17), (0.694, 20),
             (0.739, 23), (0.817, 32), (0.877, 47), (0.92, 65), (0.949, 89), (0.972, 131), (0.99, 251), (0.999, 620),
             (1.0, 1900)]
        ),
    ),
    "chat": Workload(Lognormal(5.2, 1.1, 8, 2000), Lognormal(5.1, 0.85, 4, 1000)),
    "long": Workload(Lognormal(8.5, 0.6, 512, 16000), Lognormal(5.3, 0.6, 16, 800)),
    "neutral-conv": Workload(Lognormal(6.6, 0.95, 16, 8000), Lognormal(5.0, 0.8, 4, 1000)),
    "neutral-code": Workload(Lognormal(7.3, 0.8, 64, 7400), Lognormal(2.7, 1.0, 2, 300)),
}  # fmt: skip


def source(seed: int, purpose: str = "") -> random.Random:
    """Randomness of its own for each purpose, so that drawing more of one thing changes no other."""
    return random.Random(f"{purpose} {seed}" if purpose else seed)
