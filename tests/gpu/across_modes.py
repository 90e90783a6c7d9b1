"""The same prompts in one mode after another, while shares move, and how many answers are the same."""

import asyncio
import itertools

from tidegate.policy.modes import MODES


async def move_shares(engine):
    for share in itertools.cycle((0.3, 0.7, 0.5)):
        await engine.set_shares({"P": share, "D": 1 - share})
        await asyncio.sleep(0.02)


def tokens_in_modes(engine, modes, prompts, max_tokens, check):
    """mode -> the tokens of each prompt's answer. ``check(prompts, answers, mode)`` is called after each mode."""
    by_mode = {}
    for mode in modes:
        engine.run(engine.engine.set_mode(mode))
        specs = [engine.spec(prompt, max_tokens) for prompt in prompts]
        two_lanes = len(MODES[mode].lanes) > 1
        answers = engine.answers(specs, meanwhile=move_shares(engine.engine) if two_lanes else None)
        check(prompts, answers, mode)
        by_mode[mode] = [answer.tokens for answer in answers]
    return by_mode


def check_alike(by_mode, fraction, why):
    """At least this fraction of answers is the same in any two modes, to the last token."""
    for one, other in itertools.combinations(by_mode, 2):
        pairs = list(zip(by_mode[one], by_mode[other], strict=True))
        same = sum(a == b for a, b in pairs)
        print(f"{one} and {other}: {same} of {len(pairs)} answers are the same to the last token")
        assert same >= fraction * len(pairs), why
