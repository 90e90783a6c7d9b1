"""Families with experts and latent attention give transformers' greedy tokens in the engine too, in every mode."""

from pathlib import Path

import pytest
from every_mode import check_tokens_in_every_mode
from tiny_models import FAMILIES


@pytest.mark.parametrize("family", ["mixtral, window", "qwen2 moe", "qwen3 moe", "deepseek v2, lite", "deepseek v3"])
def test_greedy_tokens_equal_transformers_in_every_mode(family: str, tmp_path: Path) -> None:
    check_tokens_in_every_mode(FAMILIES[family], tmp_path)
