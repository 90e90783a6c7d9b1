"""Models divided among ranks: each reads only its part, and together they compute what the whole model computes."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tiny_models import FALLBACK_FAMILIES, FAMILIES, Driver, empty_weights, prompt, save_tiny

from tidegate.base.errors import ModelError
from tidegate.base.specs import ModelSpec, Shard
from tidegate.kernels.collectives import Collectives, PeerLost
from tidegate.models.config import spec_from_hf
from tidegate.models.demo import demo_model_path
from tidegate.models.linears import load
from tidegate.models.shards import divide
from tidegate.models.sources import ModelSource, open_model

TOKENS = prompt(23)


def on_ranks(ranks: int, folder: Path, work: Callable[[Shard, Collectives], Any]) -> list[Any]:
    """What ``work`` returns on each rank; ranks are threads here."""
    results: list[Any] = [None] * ranks

    def rank(shard: Shard) -> None:
        try:
            results[shard.rank] = work(shard, Collectives.over_gloo(shard, str(folder / "meet")))
        except Exception as error:
            results[shard.rank] = error

    threads = [threading.Thread(target=rank, args=(Shard(i, ranks),)) for i in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failures = [result for result in results if isinstance(result, Exception)]
    if failures:
        raise failures[0]
    return results


def logits_of_ranks(source: ModelSource, ranks: int, folder: Path) -> list[torch.Tensor]:
    def work(shard: Shard, collectives: Collectives) -> torch.Tensor:
        spec = divide(source.spec, shard)
        weights = empty_weights(spec)
        load(source, weights, shard=shard)
        assert all(tensor.isfinite().all() for tensor in weights.values())
        return Driver.over(spec, weights, collectives).feed(0, TOKENS, 9)

    return on_ranks(ranks, folder, work)


def whole_logits(source: ModelSource) -> torch.Tensor:
    weights = empty_weights(source.spec)
    load(source, weights)
    return Driver.over(source.spec, weights).feed(0, TOKENS, 9)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_together_compute_the_logits_of_the_whole_model(family: str, ranks: int, tmp_path: Path) -> None:
    save_tiny(FAMILIES[family], tmp_path)
    source = open_model(str(tmp_path))
    expected = whole_logits(source)
    logits = logits_of_ranks(source, ranks, tmp_path)
    for other in logits[1:]:
        assert torch.equal(other, logits[0]), "every rank has the same logits, to the last bit"
    torch.testing.assert_close(logits[0], expected, rtol=1e-4, atol=1e-4)


def test_dummy_weights_are_the_same_ones_however_many_ranks_divide_them(tmp_path: Path) -> None:
    save_tiny(FAMILIES["qwen3 moe"], tmp_path)
    source = open_model(str(tmp_path), "dummy", seed=5)
    torch.testing.assert_close(logits_of_ranks(source, 2, tmp_path)[0], whole_logits(source), rtol=1e-4, atol=1e-4)


def test_a_gguf_file_is_divided_by_whole_groups_of_heads(tmp_path: Path) -> None:
    """The small real model has 3 KV heads: one rank has two of them."""
    source = open_model(str(demo_model_path()))
    assert [divide(source.spec, Shard(rank, 2)).num_kv_heads for rank in range(2)] == [1, 2]
    torch.testing.assert_close(logits_of_ranks(source, 2, tmp_path)[0], whole_logits(source), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(8, 2, 4), (8, 8, 3), (12, 3, 12), (6, 2, 2)])
def test_every_rank_has_the_kv_heads_that_its_queries_attend_to_and_no_others(
    heads: int, kv_heads: int, ranks: int
) -> None:
    spec = llama(heads, kv_heads)
    group = heads // kv_heads
    first = first_kv = 0
    for rank in range(ranks):
        own = divide(spec, Shard(rank, ranks))
        if kv_heads < ranks:
            assert own.num_kv_heads == 1 and own.num_heads == heads // ranks
            continue
        assert own.num_heads == own.num_kv_heads * group
        first, first_kv = first + own.num_heads, first_kv + own.num_kv_heads
    assert kv_heads < ranks or (first, first_kv) == (heads, kv_heads)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ffn", "ranks", "words"),
    [
        (4, 2, 80, 8, "4 heads over 2 KV heads"),
        (6, 2, 81, 3, "6 heads over 2 KV heads"),
        (9, 3, 80, 3, "80 inner elements"),
    ],
)
def test_what_can_not_be_divided_is_refused_in_a_sentence(
    heads: int, kv_heads: int, ffn: int, ranks: int, words: str
) -> None:
    spec = msgspec.structs.replace(llama(heads, kv_heads), ffn_size=ffn)
    with pytest.raises(ModelError, match=words) as refused:
        divide(spec, Shard(0, ranks))
    assert str(ranks) in str(refused.value) and "\n" not in str(refused.value)


def test_models_of_transformers_modules_are_refused(tmp_path: Path) -> None:
    save_tiny(FALLBACK_FAMILIES["gpt2"], tmp_path)
    with pytest.raises(ModelError, match="not divided"):
        divide(open_model(str(tmp_path)).spec, Shard(0, 2))


def test_a_rank_whose_peer_has_gone_says_so(tmp_path: Path) -> None:
    def work(shard: Shard, collectives: Collectives) -> str:
        if shard.rank == 1:
            return "gone"
        try:
            collectives.add(torch.ones(4))
        except PeerLost as lost:
            return str(lost)
        return "nothing"

    assert "does not answer" in on_ranks(2, tmp_path, work)[0]


def llama(heads: int, kv_heads: int) -> ModelSpec:
    return spec_from_hf(
        {
            "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 48, "intermediate_size": 240,
            "num_hidden_layers": 1, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 8,
            "max_position_embeddings": 128,
        }
    )  # fmt: skip
