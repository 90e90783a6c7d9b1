"""Batches in, tokens out: however a request is cut into batches and whoever shares them, its tokens are the same."""

import pytest
import tiny_lane
import torch
from tiny_lane import batch, generate, new_pool, new_runner

from tidegate.base.batch import Slice, SlotSetup
from tidegate.base.request import SamplingParams

PROMPT = [5, 17, 80, 3, 44, 61, 2, 9, 33, 70, 12, 28, 91]
OTHER = [64, 1, 7, 7, 20]
GREEDY = SamplingParams()
EVERYTHING = SamplingParams(
    temperature=1.3,
    top_p=0.9,
    top_k=40,
    min_p=0.01,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    repetition_penalty=1.2,
    seed=77,
    logit_bias={4: 2.0},
    min_tokens=4,
    stop_token_ids=(8, 9),
)
RANDOM = SamplingParams(temperature=1.0, seed=5)
PENALISED = SamplingParams(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.5)


@pytest.mark.parametrize("params", [GREEDY, RANDOM, PENALISED, EVERYTHING])
@pytest.mark.parametrize("cuts", [[1], [4, 8], [3, 5, 12], list(range(1, 13))])
def test_a_prompt_in_chunks_gives_the_tokens_of_a_prompt_in_one_piece(params: SamplingParams, cuts: list[int]) -> None:
    expected = generate(new_runner(new_pool()), PROMPT, 12, params)
    runner = new_runner(new_pool())
    setups = [SlotSetup(0, len(PROMPT), params)]
    tokens: list[int] = []
    for start, end in zip([0, *cuts], [*cuts, len(PROMPT)], strict=True):
        assert not tokens
        tokens = runner.run(batch([Slice(0, start, PROMPT[start:end], end == len(PROMPT))], setups=setups)).tokens
        setups = []
    while len(tokens) < 12:
        tokens += runner.run(batch(decodes={0: len(PROMPT) + len(tokens) - 1})).tokens
    assert tokens == expected


def test_decoding_gives_the_tokens_of_computing_every_sequence_afresh() -> None:
    tokens = generate(new_runner(new_pool()), PROMPT, 10, GREEDY)
    for count in range(10):
        known = PROMPT + tokens[:count]
        assert generate(new_runner(new_pool()), known, 1, GREEDY) == [tokens[count]]
    assert len(set(tokens)) > 3


@pytest.mark.parametrize("params", [GREEDY, RANDOM, PENALISED, EVERYTHING])
def test_a_request_among_others_gives_the_tokens_it_gives_alone(params: SamplingParams) -> None:
    expected = generate(new_runner(new_pool()), PROMPT, 6, params)
    other_expected = generate(new_runner(new_pool()), OTHER, 6, RANDOM)

    runner = new_runner(new_pool())
    tokens, other = [], []
    result = runner.run(
        batch(
            [Slice(3, 0, OTHER, True), Slice(1, 0, PROMPT[:6], False)],
            setups=[SlotSetup(3, len(OTHER), RANDOM), SlotSetup(1, len(PROMPT), params)],
        )
    )
    other += result.tokens
    for start in (6, 9):  # hybrid batches: chunks beside a decode
        end = start + 3 if start == 6 else len(PROMPT)
        last = end == len(PROMPT)
        result = runner.run(batch([Slice(1, start, PROMPT[start:end], last)], {3: len(OTHER) + len(other) - 1}))
        if last:
            tokens.append(result.tokens.pop(0))
        other += result.tokens
    while len(tokens) < 6:
        result = runner.run(batch(decodes={1: len(PROMPT) + len(tokens) - 1, 3: len(OTHER) + len(other) - 1}))
        tokens.append(result.tokens[0])
        other.append(result.tokens[1])
    assert tokens == expected
    assert other[:6] == other_expected


@pytest.mark.parametrize("params", [PENALISED, EVERYTHING])
def test_penalties_count_tokens_that_a_prefix_hit_skipped(params: SamplingParams) -> None:
    expected = generate(new_runner(new_pool()), PROMPT, 8, params)
    pool = new_pool()
    runner = new_runner(pool)
    generate(runner, PROMPT, 8, GREEDY, slot=0)
    pool.table[2, :2] = pool.table[0, :2]  # slot 2 shares the first eight positions' blocks
    setups = [SlotSetup(2, len(PROMPT), params)]
    tokens = runner.run(batch([Slice(2, 8, PROMPT[8:], True, PROMPT[:8])], setups=setups)).tokens
    while len(tokens) < 8:
        tokens += runner.run(batch(decodes={2: len(PROMPT) + len(tokens) - 1})).tokens
    assert tokens == expected


@pytest.mark.parametrize("params", [GREEDY, EVERYTHING])
def test_a_preempted_request_that_is_computed_again_elsewhere_goes_on_the_same(params: SamplingParams) -> None:
    expected = generate(new_runner(new_pool()), PROMPT, 9, params)
    known = PROMPT + expected[:4]  # what the core knows; the first tokens stay output
    runner = new_runner(new_pool())
    tokens = runner.run(batch([Slice(3, 0, known, True)], setups=[SlotSetup(3, len(PROMPT), params)])).tokens
    while len(tokens) < 5:
        tokens += runner.run(batch(decodes={3: len(known) + len(tokens) - 1})).tokens
    assert tokens == expected[4:]


@pytest.mark.parametrize("params", [GREEDY, RANDOM, EVERYTHING])
def test_a_new_lane_over_the_same_pool_repeats_a_lost_batch_and_goes_on(params: SamplingParams) -> None:
    expected = generate(new_runner(new_pool()), PROMPT, 9, params)
    pool = new_pool()
    tokens = generate(new_runner(pool), PROMPT, 5, params)
    lost = new_runner(pool)
    setups = [SlotSetup(0, len(PROMPT), params)]
    lost.run(batch(decodes={0: len(PROMPT) + 4}, setups=setups))
    restarted = new_runner(pool)
    while len(tokens) < 9:
        tokens += restarted.run(batch(decodes={0: len(PROMPT) + len(tokens) - 1}, setups=setups)).tokens
        setups = []
    assert tokens == expected


def test_another_lane_over_the_pool_decodes_what_one_lane_prefilled() -> None:
    expected = generate(new_runner(new_pool()), PROMPT, 6, EVERYTHING)
    pool = new_pool()
    tokens = generate(new_runner(pool), PROMPT, 1, EVERYTHING)
    decoder, setups = new_runner(pool), [SlotSetup(0, len(PROMPT), EVERYTHING)]
    while len(tokens) < 6:
        tokens += decoder.run(batch(decodes={0: len(PROMPT) + len(tokens) - 1}, setups=setups)).tokens
        setups = []
    assert tokens == expected


def test_sampled_tokens_are_stored_where_the_next_step_reads_them() -> None:
    pool = new_pool()
    tokens = generate(new_runner(pool), PROMPT, 4, GREEDY, slot=2)
    assert pool.tokens[2, : len(PROMPT) + 4].tolist() == PROMPT + tokens
    assert not pool.tokens[[0, 1, 3]].any()


def test_the_last_position_of_the_longest_request_can_be_sampled() -> None:
    pool = new_pool()
    prompt = (PROMPT * 5)[: tiny_lane.POOL.max_model_len]
    assert generate(new_runner(pool), prompt, 1, GREEDY) == [int(pool.tokens[0, tiny_lane.POOL.max_model_len])]


def test_the_block_table_and_other_requests_blocks_are_never_written() -> None:
    pool = new_pool()
    table, kv = pool.table.clone(), pool.kv.clone()
    generate(new_runner(pool), PROMPT, 4, EVERYTHING, slot=1)
    assert torch.equal(pool.table, table)
    written = (pool.kv != kv).flatten(3).any(-1).any(0).any(0)
    own = set(pool.table[1, : -(-(len(PROMPT) + 3) // tiny_lane.POOL.block_size)].tolist())
    assert set(written.nonzero().flatten().tolist()) == own


def test_a_result_names_its_batch_and_takes_time() -> None:
    runner = new_runner(new_pool())
    chunk = runner.run(batch([Slice(0, 0, PROMPT, False)], setups=[SlotSetup(0, 20, GREEDY)], batch_id=41))
    assert (chunk.id, chunk.tokens, chunk.logprobs) == (41, [], None)
    assert chunk.seconds > 0


def test_logprobs_come_for_the_rows_that_ask_and_only_then() -> None:
    runner = new_runner(new_pool())
    setups = [SlotSetup(0, len(PROMPT), GREEDY), SlotSetup(1, len(OTHER), SamplingParams(logprobs=2))]
    result = runner.run(batch([Slice(0, 0, PROMPT, True), Slice(1, 0, OTHER, True)], setups=setups))
    assert result.logprobs is not None
    plain, asked = result.logprobs
    assert plain is None
    assert asked is not None
    assert asked.rank == 1
    assert asked.top_ids[0] == result.tokens[1]
    assert asked.top_logprobs[0] == asked.chosen
    assert all(type(token) is int for token in result.tokens)
    assert runner.run(batch(decodes={0: len(PROMPT)})).logprobs is None
