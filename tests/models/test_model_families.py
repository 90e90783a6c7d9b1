"""Every family's logits are transformers', however the tokens are cut into steps and wherever their blocks lie."""

from pathlib import Path

import pytest
import torch
from tiny_models import FALLBACK_FAMILIES, FAMILIES, Driver, prompt, reference_logits, save_tiny
from transformers import PreTrainedModel

from tidegate.kernels.cpu_attention import CpuAttention
from tidegate.kernels.torch_attention import TorchAttention
from tidegate.kernels.windows import Backend

TOLERANCE = {"rtol": 0.0, "atol": 1e-4}


ALL_FAMILIES = FAMILIES | FALLBACK_FAMILIES


@pytest.fixture(scope="module", params=ALL_FAMILIES, ids=lambda name: name.replace(", ", "-").replace(" ", "-"))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, str]:
    folder: Path = tmp_path_factory.mktemp("model")
    return save_tiny(ALL_FAMILIES[request.param], folder), str(folder)


@pytest.mark.parametrize("length", [1, 2, 5, 33])
def test_a_prompt_in_one_step_gives_the_references_logits(family: tuple[PreTrainedModel, str], length: int) -> None:
    reference, path = family
    tokens = prompt(length)
    torch.testing.assert_close(Driver(path).feed(0, tokens, length), reference_logits(reference, tokens), **TOLERANCE)


@pytest.mark.parametrize("blocks", ["ascending", "descending", "two runs"])
@pytest.mark.parametrize("chunk", [1, 3, 11])
def test_how_a_prompt_is_cut_does_not_matter(family: tuple[PreTrainedModel, str], chunk: int, blocks: str) -> None:
    reference, path = family
    tokens = prompt(40)
    ours = Driver(path, blocks=blocks).feed(0, tokens, chunk)
    torch.testing.assert_close(ours, reference_logits(reference, tokens), **TOLERANCE)


@pytest.mark.parametrize("backend", [TorchAttention, CpuAttention])
@pytest.mark.parametrize("blocks", ["ascending", "two runs"])
def test_rows_in_one_step_do_not_see_each_other(
    family: tuple[PreTrainedModel, str], blocks: str, backend: Backend
) -> None:
    reference, path = family
    prompts = [prompt(length, seed) for seed, length in enumerate((21, 9, 30, 14))]
    expected = [reference_logits(reference, tokens) for tokens in prompts]
    driver = Driver(path, blocks=blocks, backend=backend)
    for slot in (0, 1):
        driver.feed(slot, prompts[slot][:8], 8)
    # Two prefill rows (one from the start, one later continued), then two decode rows, in one step.
    first = driver.step([(2, prompts[2][:17]), (3, prompts[3]), (0, prompts[0][8:9]), (1, prompts[1][8:9])])
    second = driver.step([(2, prompts[2][17:]), (0, prompts[0][9:10])])
    got = [first[2], first[3], torch.cat((first[0], second[0])), first[1], second[1]]
    want = [expected[0][8:9], expected[1][8:9], expected[2], expected[3], expected[0][9:10]]
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


def test_tokens_that_are_not_wanted_leave_their_keys_and_values(family: tuple[PreTrainedModel, str]) -> None:
    reference, path = family
    prompts = [prompt(length, seed) for seed, length in enumerate((21, 9))]
    long, short = (reference_logits(reference, tokens) for tokens in prompts)
    driver = Driver(path)
    assert len(driver.logits([(0, prompts[0][:8]), (1, prompts[1][:3])], [])) == 0
    few = driver.logits([(0, prompts[0][8:20]), (1, prompts[1][3:8])], [16, 5])
    torch.testing.assert_close(few, torch.stack((short[7], long[13])), **TOLERANCE)
    last = driver.logits([(0, prompts[0][20:]), (1, prompts[1][8:])], None)
    torch.testing.assert_close(last, torch.stack((long[20], short[8])), **TOLERANCE)


def test_logits_are_spread_enough_for_these_comparisons_to_mean_something(family: tuple[PreTrainedModel, str]) -> None:
    reference, _ = family
    logits = reference_logits(reference, prompt(40))
    assert logits.std() > 0.1
    assert len(set(logits.argmax(-1).tolist())) > 4
