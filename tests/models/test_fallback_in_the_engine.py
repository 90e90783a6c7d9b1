"""Models by transformers' own modules give transformers' greedy tokens in the engine too, in every mode."""

from pathlib import Path

import pytest
from every_mode import check_tokens_in_every_mode
from tiny_models import FALLBACK_FAMILIES


@pytest.mark.parametrize("family", ["gpt2", "gemma3", "granite"])
def test_greedy_tokens_equal_transformers_in_every_mode(family: str, tmp_path: Path) -> None:
    check_tokens_in_every_mode(FALLBACK_FAMILIES[family], tmp_path)
