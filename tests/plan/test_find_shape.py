"""Shapes that a plan is made for."""

import json

import pytest

from tidegate.base.errors import ModelError
from tidegate.plan.shapes import find_shape


def test_models_whose_costs_are_not_known_are_refused_not_planned_for_as_if_they_were_dense(tmp_path):
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 512, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="Plans for Qwen3MoeForCausalLM are not supported"):
        find_shape(str(tmp_path))
