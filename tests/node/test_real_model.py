"""On the small real model too, greedy tokens equal transformers' in every mode."""

from engine_driver import SLO, EngineDriver, reference

from tidegate.node.config import EngineConfig
from tidegate.policy.modes import MODES

TEXT = (
    "The harbour wall was built in stages. First came the rubble, tipped from barges at low tide; then the blocks, "
    "each as large as a cart; and last the paved walk along the top, from which the keeper watched the gate. When the "
    "water rose he let it in slowly, and when it fell he kept some back, so that the mills below never stood still. "
)
MAX_TOKENS = 16


def test_the_real_model_answers_as_in_transformers_alone_and_together_in_every_mode(smollm2):
    path, model, tokenizer = smollm2
    story = tokenizer(TEXT * 30).input_ids
    prompts = [tokenizer("Hello").input_ids[:1], tokenizer("The capital of France is").input_ids]
    prompts += [story[start : start + length] for start, length in ((0, 40), (7, 333), (0, 120), (0, 2000))]
    references = [reference(model, prompt, MAX_TOKENS) for prompt in prompts]
    settings = EngineConfig(model=path, max_model_len=2048, num_blocks=400, prefix_caching=False, slo=SLO)
    with EngineDriver(settings) as engine:
        (alone,) = engine.answers([engine.spec(prompts[1], MAX_TOKENS)])
        references[1].check(alone.tokens, "alone")
        assert tokenizer.decode(alone.tokens).startswith(" Paris")
        for mode in MODES:
            engine.run(engine.engine.set_mode(mode))
            answers = engine.answers([engine.spec(prompt, MAX_TOKENS) for prompt in prompts])
            for expected, answer in zip(references, answers, strict=True):
                expected.check(answer.tokens, mode)


def test_in_int8_answers_are_the_same_from_a_cold_cache_and_a_warm_one_in_every_mode(smollm2):
    """To the last token, without a model in float to excuse near ties: no sum depends on how a prompt is cut."""
    path, _, tokenizer = smollm2
    story = tokenizer(TEXT * 8).input_ids
    prompts = [story[start : start + length] for start, length in ((0, 37), (3, 400), (11, 130), (0, 200))]
    settings = EngineConfig(model=path, quantization="int8", max_model_len=1024, num_blocks=400, slo=SLO)
    answers = {}
    with EngineDriver(settings) as engine:
        for mode in MODES:
            engine.run(engine.engine.set_mode(mode))
            engine.run(engine.engine.reset_prefix_cache())
            for cache in ("cold", "warm"):
                specs = [engine.spec(prompt, 3 * MAX_TOKENS) for prompt in prompts]
                answers[mode, cache] = [answer.tokens for answer in engine.answers(specs)]
    assert len({str(tokens) for tokens in answers.values()}) == 1, answers
