"""The same greedy tokens as transformers' in every mode, share, batch mix, preemption and change of mode."""

import asyncio
import itertools

import pytest
from engine_driver import SLO, EngineDriver

from tidegate.node.config import EngineConfig
from tidegate.policy.modes import MODES

PLENTY, SCARCE = 3000, 150  # blocks; the longest request alone needs 127
ALONE = 8


def config(model, **more):
    return EngineConfig(model=model, max_model_len=2100, max_num_seqs=40, max_num_batched_tokens=512, slo=SLO, **more)


def check(references, answers, what):
    ties = 0
    for expected, answer in zip(references, answers, strict=True):
        assert answer.finish == "length", what
        ties += expected.check(answer.tokens, what)
    assert ties <= len(answers) // 4, f"{what}: ties should be rare"


def specs(engine, references):
    return [engine.spec(r.prompt, len(r.tokens)) for r in references]


async def move_shares(engine):
    for share in itertools.cycle((0.2, 0.8, 0.5)):
        await engine.set_shares({"P": share, "D": 1 - share})
        await asyncio.sleep(0.05)


async def change_modes(engine):
    for mode in itertools.cycle(MODES):
        await engine.set_mode(mode)
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("num_blocks", [PLENTY, SCARCE], ids=["plenty", "preempting"])
@pytest.mark.parametrize("caching", [True, False], ids=["prefix cache", "no prefix cache"])
def test_greedy_tokens_equal_transformers_in_every_mode(tiny_model, references, caching, num_blocks):
    with EngineDriver(config(tiny_model[0], prefix_caching=caching, num_blocks=num_blocks)) as engine:
        for mode in MODES:
            engine.run(engine.engine.set_mode(mode))
            for expected in references[:ALONE]:
                (answer,) = engine.answers(specs(engine, [expected]))
                check([expected], [answer], f"{mode}, alone")
            check(references, engine.answers(specs(engine, references)), f"{mode}, 32 at once")
            two_lanes = len(MODES[mode].lanes) > 1
            if two_lanes:
                answers = engine.answers(specs(engine, references), meanwhile=move_shares(engine.engine))
                check(references, answers, f"{mode}, shares moving")
            engine.run(engine.engine.reset_prefix_cache())
        answers = engine.answers(specs(engine, references), meanwhile=change_modes(engine.engine))
        check(references, answers, "modes changing")
        stats = engine.stats()
        assert (stats.preemptions > 0) == (num_blocks == SCARCE)
        assert (stats.prefix_hits_tokens > 0) == caching
        assert stats.handovers > 0 and stats.handover_copied_bytes == 0
        assert stats.blocks_used == 0
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
