"""What a request asks for is what it gets, whoever else is in the batch."""

import random
from typing import Any

import numpy as np
import pytest
import sampling_reference as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from tidegate.base.batch import SlotSetup
from tidegate.base.request import SamplingParams
from tidegate.runner.philox import uniforms
from tidegate.runner.sampler import Sampled, Sampler

VOCAB = 67
MAX_LEN = 24


class Request:
    """A request at one step: its tokens so far and the logits that the model would give."""

    def __init__(self, seed: int, params: SamplingParams, prompt_len: int = 5, output_len: int = 7) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.params = params
        self.logits = torch.randn(VOCAB, generator=generator) * 2
        tokens = torch.randint(VOCAB, (MAX_LEN,), generator=generator).tolist()
        self.prompt, self.output = tokens[:prompt_len], tokens[prompt_len : prompt_len + output_len]
        self.stale = tokens[prompt_len + output_len :]  # what an earlier owner left in the slot

    def adjusted(self) -> reference.Row:
        return reference.adjusted(self.logits.double().numpy(), self.params, self.prompt, self.output)


def sample(requests: list[Request], slots: list[int] | None = None, device: str = "cpu") -> Sampled:
    slots = slots or list(range(len(requests)))
    store = torch.zeros(max(slots) + 1, MAX_LEN, dtype=torch.int32, device=device)
    sampler = Sampler(store, VOCAB)
    for slot, request in zip(slots, requests, strict=True):
        tokens = request.prompt + request.output + request.stale
        store[slot, : len(tokens)] = torch.tensor(tokens)
        sampler.apply([SlotSetup(slot, len(request.prompt), request.params)])
    logits = torch.stack([request.logits for request in requests]).to(device)
    return sampler.sample(logits, slots, [len(request.prompt + request.output) for request in requests])


def greedy(request: Request) -> int:
    return int(sample([request]).tokens[0])


def any_params(**fixed: Any) -> st.SearchStrategy[SamplingParams]:
    token = st.integers(0, VOCAB - 1)
    choices: dict[str, Any] = {
        "temperature": st.sampled_from([0.0, 0.0, 0.4, 1.0, 1.5]),
        "top_p": st.sampled_from([1.0, 0.9, 0.3]),
        "top_k": st.sampled_from([0, 1, 10, 500]),
        "min_p": st.sampled_from([0.0, 0.02]),
        "presence_penalty": st.sampled_from([0.0, 0.8, -0.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.3, -0.2]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.8]),
        "seed": st.integers(0, 2**64 - 1),
        "logit_bias": st.just({}) | st.dictionaries(token, st.floats(-100, 100), max_size=4),
        "logprobs": st.sampled_from([None, 0, 1, 5]),
        "min_tokens": st.sampled_from([0, 7, 8, 20]),
        "stop_token_ids": st.lists(token, max_size=4, unique=True).map(tuple),
    }
    return st.builds(SamplingParams, **choices | fixed)


def any_request(**fixed: Any) -> st.SearchStrategy[Request]:
    return st.builds(Request, st.integers(0, 2**31), any_params(**fixed), st.integers(1, 6), st.integers(0, 9))


requests = any_request()
greedy_requests = any_request(temperature=st.just(0.0))
unfiltered_requests = any_request(temperature=st.sampled_from([0.4, 1.0, 3.0]), top_p=st.just(1.0), top_k=st.just(0))


@given(st.lists(greedy_requests, min_size=1, max_size=6))
@settings(deadline=None)
def test_greedy_takes_the_best_token_after_bias_min_tokens_and_penalties(crowd: list[Request]) -> None:
    for request, token in zip(crowd, sample(crowd).tokens.tolist(), strict=True):
        x = request.adjusted()
        assert x[token] >= x.max() - 1e-4


@given(st.lists(unfiltered_requests, min_size=1, max_size=6))
@settings(deadline=None)
def test_random_rows_draw_from_the_adjusted_logits(crowd: list[Request]) -> None:
    for request, token in zip(crowd, sample(crowd).tokens.tolist(), strict=True):
        p = reference.probabilities(request.adjusted(), request.params)
        position = np.array([len(request.prompt + request.output)])
        uniform = uniforms(np.array([request.params.seed], dtype=np.uint64), position)[0]
        assert p[:token].sum() - 1e-4 <= uniform <= p[: token + 1].sum() + 1e-4


@given(st.lists(requests, min_size=2, max_size=8), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_a_row_is_the_same_alone_and_in_any_crowd_in_any_order_and_slot(
    crowd: list[Request], shuffler: random.Random
) -> None:
    together = sample(crowd)
    records = together.logprob_records() or [None] * len(crowd)
    order = shuffler.sample(range(len(crowd)), len(crowd))
    slots = shuffler.sample(range(20), len(crowd))
    shuffled = sample([crowd[row] for row in order], slots)
    shuffled_records = shuffled.logprob_records() or [None] * len(crowd)
    for at, row in enumerate(order):
        alone = sample([crowd[row]])
        alone_record = (alone.logprob_records() or [None])[0]
        assert together.tokens[row] == shuffled.tokens[at] == alone.tokens[0]
        assert records[row] == shuffled_records[at] == alone_record


def test_greedy_takes_the_lowest_id_of_equally_good_tokens() -> None:
    request = Request(0, SamplingParams())
    request.logits[[9, 30, 50]] = 20.0
    assert greedy(request) == 9


def test_temperatures_too_small_to_matter_are_greedy() -> None:
    for seed in range(20):
        request = Request(seed, SamplingParams(temperature=9e-6, seed=seed))
        assert greedy(request) == int(request.logits.argmax())


@pytest.mark.parametrize("penalty", [1.2, 2.0, 0.7])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    for seed in range(30):
        request = Request(seed, SamplingParams(repetition_penalty=penalty))
        ids = torch.tensor([request.prompt + request.output])
        expected = int(RepetitionPenaltyLogitsProcessor(penalty)(ids, request.logits[None].clone()).argmax())
        assert greedy(request) == expected


@pytest.mark.parametrize("kind", ["presence_penalty", "frequency_penalty"])
def test_presence_and_frequency_penalties_leave_prompt_tokens_alone(kind: str) -> None:
    request = Request(3, SamplingParams(**{kind: 100.0}))  # type: ignore[arg-type]
    request.prompt, request.output = [1, 2, 3, 4, 5], [6, 6, 7]
    request.logits[:8] = torch.tensor([0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 40.0, 30.0])
    assert greedy(request) == 5


def test_frequency_counts_every_occurrence_and_presence_only_the_first() -> None:
    def choice(**penalties: float) -> int:
        request = Request(4, SamplingParams(**penalties))  # type: ignore[arg-type]
        request.output = [6, 6, 6, 7]
        request.logits[6], request.logits[7] = 20.0, 19.0
        return greedy(request)

    assert choice(presence_penalty=1.0) == 6
    assert choice(frequency_penalty=0.4) == 6
    assert choice(frequency_penalty=0.6) == 7


def test_what_an_earlier_owner_left_in_the_slot_is_not_penalised() -> None:
    longer = Request(99, SamplingParams(repetition_penalty=5.0), output_len=9)
    for seed in range(30):
        request = Request(seed, SamplingParams(repetition_penalty=5.0, presence_penalty=2.0), output_len=2)
        request.stale[0] = next(token for token in range(VOCAB) if token not in request.prompt + request.output)
        request.logits[request.stale[0]] = 20.0
        request.logits[-1] = 19.0
        assert sample([request, longer]).tokens[0] == request.stale[0]


@pytest.mark.parametrize(("outputs", "stops"), [(0, False), (2, False), (3, True), (4, True)])
def test_stop_tokens_are_barred_until_min_tokens_are_out(outputs: int, stops: bool) -> None:
    params = SamplingParams(min_tokens=3, stop_token_ids=(11, 12))
    request = Request(5, params, output_len=outputs)
    request.logits[11], request.logits[12], request.logits[40] = 50.0, 49.0, 48.0
    assert greedy(request) == (11 if stops else 40)


def test_logit_bias_moves_tokens_for_greedy_and_random_rows() -> None:
    for temperature in (0.0, 1.0):
        up = Request(6, SamplingParams(temperature=temperature, logit_bias={33: 100.0}))
        assert greedy(up) == 33
        down = Request(6, SamplingParams(temperature=temperature, logit_bias=dict.fromkeys(range(1, VOCAB), -100.0)))
        assert greedy(down) == 0


def test_ids_outside_the_vocabulary_are_ignored() -> None:
    params = SamplingParams(logit_bias={VOCAB: 100.0, -1: 100.0}, min_tokens=50, stop_token_ids=(VOCAB + 5, -1))
    request = Request(7, params)
    assert greedy(request) == int(request.logits.argmax())


def test_a_slots_next_owner_inherits_nothing() -> None:
    sampler = Sampler(torch.zeros(1, MAX_LEN, dtype=torch.int32), VOCAB)
    logits = Request(8, SamplingParams()).logits[None]
    loud = SamplingParams(1.0, logit_bias={1: 100.0}, min_tokens=9, stop_token_ids=(2,), logprobs=3, presence_penalty=1)
    sampler.apply([SlotSetup(0, 1, loud)])
    assert sampler.sample(logits.clone(), [0], [1]).tokens.tolist() == [1]
    sampler.apply([SlotSetup(0, 1, SamplingParams())])
    plain = sampler.sample(logits.clone(), [0], [1])
    assert plain.tokens.tolist() == [int(logits.argmax())]
    assert plain.logprob_records() is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_of_the_raw_logits(temperature: float) -> None:
    bias = {3: 50.0}
    asks = [Request(seed, SamplingParams(temperature, logprobs=4, logit_bias=bias)) for seed in range(10)]
    plain = [Request(seed, SamplingParams(temperature)) for seed in range(10, 20)]
    crowd = [request for pair in zip(asks, plain, strict=True) for request in pair]
    sampled = sample(crowd)
    records = sampled.logprob_records()
    assert records is not None
    for request, token, record in zip(crowd, sampled.tokens.tolist(), records, strict=True):
        if request.params.logprobs is None:
            assert record is None
            continue
        expected = torch.log_softmax(request.logits, -1)
        assert record is not None
        assert record.chosen == pytest.approx(float(expected[token]), abs=1e-6)
        assert record.rank == 1 + int((request.logits > request.logits[token]).sum())
        assert record.top_ids == expected.topk(4).indices.tolist()
        assert record.top_logprobs == pytest.approx(expected.topk(4).values.tolist(), abs=1e-6)


def test_each_row_gets_as_many_logprobs_as_it_asks_for() -> None:
    crowd = [Request(n, SamplingParams(logprobs=n)) for n in (0, 2, 5, 1000)]
    records = sample(crowd).logprob_records()
    assert records is not None
    assert [len(record.top_ids) for record in records if record] == [0, 2, 5, VOCAB]
    assert [len(record.top_logprobs) for record in records if record] == [0, 2, 5, VOCAB]
    assert [record.rank for record in records if record] == [1, 1, 1, 1]


@given(st.lists(requests, min_size=1, max_size=8))
@settings(deadline=None)
def test_choosing_tokens_never_waits_for_the_device(crowd: list[Request]) -> None:
    sampled = sample(crowd, device="meta")  # holds no values: reading one raises
    assert sampled.tokens.device.type == "meta"
    assert sampled.tokens.shape == (len(crowd),)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@given(st.lists(requests, min_size=1, max_size=8))
@settings(deadline=None)
def test_a_gpu_chooses_what_the_cpu_chooses(crowd: list[Request]) -> None:
    ours, theirs = sample(crowd), sample(crowd, device="cuda")
    assert ours.tokens.tolist() == theirs.tokens.tolist()
