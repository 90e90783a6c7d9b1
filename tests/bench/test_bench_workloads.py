"""Built-in workloads have the lengths that they say, and equal seeds give equal loads."""

import math
import random
from itertools import islice, pairwise

import pytest

from tidegate.base.errors import ConfigError
from tidegate.bench.arrivals import POISSON
from tidegate.bench.plan import Amount, Lengths, arrivals, find_workload
from tidegate.bench.workloads import WORKLOADS, Request, source

DATA = {  # mean, p25, p50, p75, p90 of the traces that they are fitted to
    ("conv", "prompt_tokens"): (1155, 396, 1020, 1189, 2734),
    ("conv", "output_tokens"): (211, 85, 129, 395, 424),
    ("code", "prompt_tokens"): (2048, 578, 1469, 2744, 5188),
    ("code", "output_tokens"): (27.9, 9, 13, 24, 55),
}
MEANS = {"chat": (314, 228), "long": (5777, 238)}


def draw(name, count=40_000):
    return list(islice(WORKLOADS[name].requests(source(1)), count))


@pytest.mark.parametrize(("name", "field"), list(DATA))
def test_fitted_workloads_have_the_mean_and_the_quantiles_of_their_trace(name, field):
    lengths = sorted(getattr(request, field) for request in draw(name))
    mean, *quantiles = DATA[name, field]
    assert sum(lengths) / len(lengths) == pytest.approx(mean, rel=0.04)
    for share, expected in zip((0.25, 0.5, 0.75, 0.9), quantiles, strict=True):
        assert lengths[int(share * len(lengths))] == pytest.approx(expected, rel=0.05, abs=1)


@pytest.mark.parametrize("name", list(MEANS))
def test_plain_workloads_have_the_means_they_name(name):
    requests = draw(name)
    for field, mean in zip(("prompt_tokens", "output_tokens"), MEANS[name], strict=True):
        assert sum(getattr(request, field) for request in requests) / len(requests) == pytest.approx(mean, rel=0.03)


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_every_request_has_at_least_one_token_each_way(name):
    assert all(request.prompt_tokens >= 1 and request.output_tokens >= 1 for request in draw(name, 5000))


def test_plain_lengths_are_drawn_prompt_first_from_the_seed_itself():
    rng = random.Random(7)
    expected = []
    for _ in range(50):
        prompt = max(16, min(8000, int(rng.lognormvariate(6.6, 0.95))))
        expected.append(Request(prompt, max(4, min(1000, int(rng.lognormvariate(5.0, 0.8))))))
    assert list(islice(WORKLOADS["neutral-conv"].requests(source(7)), 50)) == expected


def test_arrivals_are_poisson():
    moments = list(islice(POISSON.times(4.0, source(3)), 20_001))
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    mean = sum(gaps) / len(gaps)
    assert moments[0] == 0.0
    assert mean == pytest.approx(0.25, rel=0.03)
    assert math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) == pytest.approx(mean, rel=0.05)
    assert sum(gap > 0.25 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.015)


def test_an_infinite_rate_is_all_at_once():
    assert list(islice(POISSON.times(math.inf, source(0)), 3)) == [0.0, 0.0, 0.0]


def test_equal_seeds_give_equal_loads_and_others_do_not():
    chat = WORKLOADS["chat"]
    once, again, other = (list(islice(arrivals(chat, 2.0, seed), 50)) for seed in (1, 1, 2))
    assert once == again != other


def test_lengths_do_not_depend_on_the_rate():
    slow, fast = (list(islice(arrivals(WORKLOADS["conv"], rate, 5), 50)) for rate in (1.0, 100.0))
    assert [request.prompt_tokens for request in slow] == [request.prompt_tokens for request in fast]
    assert slow[-1].at_s > 10 * fast[-1].at_s


def test_the_amount_is_requests_or_the_expected_number_in_a_time():
    assert Amount(num_requests=7).at(100.0) == 7
    assert Amount(seconds=10).at(2.5) == 25
    assert Amount(seconds=0.1).at(1.0) == 1
    with pytest.raises(ConfigError, match="--num-requests"):
        Amount().at(math.inf)


def test_fixed_lengths_replace_those_of_the_workload():
    requests = [Request(5, 6, 0.5, (1, 2)), Request(7, 8)]
    assert list(Lengths().applied(requests)) == requests
    assert list(Lengths(output_tokens=3).applied(requests)) == [Request(5, 3, 0.5, (1, 2)), Request(7, 3)]
    assert list(Lengths(100, 3).applied(requests)) == [Request(100, 3, 0.5), Request(100, 3)]


def test_a_workload_that_does_not_exist_is_named_with_those_that_do():
    with pytest.raises(ConfigError, match=r"no workload 'talk'.*conv, code, chat, long"):
        find_workload("talk")
