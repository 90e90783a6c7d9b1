"""The engine on a GPU: transformers' tokens up to bf16 rounding, and the same ones in every mode and share."""

from functools import partial

import pytest
import torch
from across_modes import check_alike, tokens_in_modes
from engine_driver import SLO, EngineDriver, mixed_prompts

from tidegate.node.config import EngineConfig
from tidegate.policy.modes import MODES

MAX_TOKENS = 24


def config(model, **more):
    asked = {"max_model_len": 2100, "num_blocks": 1500, "max_num_seqs": 40, "slo": SLO}
    return EngineConfig(model=model, device="cuda", **asked | more)


@torch.inference_mode()
def regrets(model, prompt, tokens):
    """How much worse than the best one the float32 reference finds each token, in standard deviations of its logits."""
    logits = model(torch.tensor([prompt + tokens], device="cuda")).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]
    return ((logits.max(-1).values - chosen) / logits.std(-1)).tolist()


def check(model, prompts, answers, what):
    found = [r for p, a in zip(prompts, answers, strict=True) for r in regrets(model, p, a.tokens)]
    best = sum(r == 0.0 for r in found) / len(found)
    print(f"{what}: {best:.1%} of {len(found)} tokens are the float32 reference's, largest regret {max(found):.4f} std")
    assert best > 0.95 and max(found) < 0.1, what


def test_tokens_are_transformers_in_every_mode_and_share(family_on_gpu):
    path, model = family_on_gpu
    prompts = mixed_prompts(32, 2000, 1000)
    with EngineDriver(config(path, prefix_caching=False)) as engine:
        by_mode = tokens_in_modes(engine, MODES, prompts, MAX_TOKENS, partial(check, model))
        assert engine.stats().blocks_used == 0
    check_alike(by_mode, 0.8, "bf16 may break ties differently, seldom")


def test_sampling_and_penalties_repeat_alone_and_in_a_crowd(tiny_on_gpu):
    path, _ = tiny_on_gpu
    wanted = {"temperature": 0.8, "seed": 3, "top_p": 0.9, "repetition_penalty": 1.2}
    with EngineDriver(config(path)) as engine:
        (alone,) = engine.answers([engine.spec([5, 6, 7], 12, **wanted)])
        crowd = [engine.spec([i + 1] * (3 + 40 * i), 12) for i in range(8)]
        together = engine.answers([*crowd, engine.spec([5, 6, 7], 12, **wanted)])
        same = sum(a == b for a, b in zip(alone.tokens, together[-1].tokens, strict=True))
        assert same >= 10, "another batch size may round bf16 differently, seldom"
        (logged,) = engine.answers([engine.spec([5, 6, 7], 4, logprobs=3)])
        for output in logged.outputs:
            assert output.logprobs[0].rank == 1 and len(output.logprobs[0].top_ids) == 3


def test_preempted_requests_get_the_same_tokens(tiny_on_gpu):
    path, model = tiny_on_gpu
    prompts = mixed_prompts(24, 1200, 1000, seed=4)
    scarce = EngineConfig(model=path, device="cuda", max_model_len=1300, num_blocks=100, max_num_seqs=40)
    with EngineDriver(scarce) as engine:
        answers = engine.answers([engine.spec(prompt, 60) for prompt in prompts])
        check(model, prompts, answers, "preempted")
        assert engine.stats().preemptions > 0


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_the_two_parts_of_a_division_have_no_sm_in_common(share):
    from tidegate.device.green_contexts import SmParts
    from tidegate.kernels.triton_sm_ids import SmIds

    parts = SmParts()
    first, rest = parts.pair(share)
    ours, theirs = (SmIds(parts.new_stream(part)).wait() for part in (first, rest))
    assert len(ours) == first.sms and len(theirs) == rest.sms
    assert not ours & theirs and len(ours | theirs) == parts.total
    assert len(SmIds(parts.new_stream()).wait()) == parts.total


def test_pool_memory_can_be_exported():
    import os

    from tidegate.device.gpu_memory import GpuMemory

    memory = GpuMemory(1 << 20)
    fd = memory.export()
    os.fstat(fd)
    os.close(fd)
