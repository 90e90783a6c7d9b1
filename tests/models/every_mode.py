"""A tiny model in a real engine, in every mode, against transformers."""

from pathlib import Path
from typing import Any

from engine_driver import SLO, EngineDriver, mixed_prompts, reference
from tiny_models import VOCAB, save_tiny

from tidegate.node.config import EngineConfig
from tidegate.policy.modes import MODES

LONGEST, MAX_TOKENS = 80, 8


def check_tokens_in_every_mode(config: Any, folder: Path, ranks: int = 1) -> None:
    """Asserts that ten prompts are answered with transformers' greedy tokens, alone and at once, though requests are
    preempted for want of blocks."""
    model = save_tiny(config, folder)
    references = [reference(model, tokens, MAX_TOKENS) for tokens in mixed_prompts(10, LONGEST, VOCAB)]
    settings = EngineConfig(
        model=str(folder),
        device="cpu",
        tensor_parallel_size=ranks,
        max_model_len=100,
        num_blocks=12,
        max_num_seqs=12,
        max_num_batched_tokens=64,
        slo=SLO,
    )
    ties = 0
    with EngineDriver(settings) as engine:
        for mode in MODES:
            engine.run(engine.engine.set_mode(mode))
            (alone,) = engine.answers([engine.spec(references[0].prompt, MAX_TOKENS)])
            ties += references[0].check(alone.tokens, f"{mode}, alone")
            answers = engine.answers([engine.spec(r.prompt, MAX_TOKENS) for r in references])
            for expected, answer in zip(references, answers, strict=True):
                ties += expected.check(answer.tokens, mode)
        assert engine.stats().preemptions > 0
    assert ties <= len(references) // 4, "ties should be rare"
