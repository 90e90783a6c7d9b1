"""Tiles for experts: measured ones for the shapes that were measured, usual ones for the rest."""

import json

import pytest

from tidegate.kernels import expert_tiles
from tidegate.kernels.expert_tiles import MEASURED, USUAL, Tile, Tiles, tiles_for

FEW, MANY = (
    Tiles(Tile(16, 32, 64, 4, 3), Tile(16, 64, 64, 4, 3)),
    Tiles(Tile(64, 64, 64, 4, 3), Tile(64, 128, 64, 8, 3)),
)


@pytest.fixture
def measured(tmp_path, monkeypatch):
    rows = [{"up_to_tokens": n, "gate_up": list(t.gate_up), "down": list(t.down)} for n, t in ((8, FEW), (64, MANY))]
    layer = {"num_experts": 12, "per_token": 2, "hidden": 128, "ffn": 96, "tiles": rows}
    (tmp_path / "tiles.json").write_text(json.dumps({"device": "a GPU", "layers": [layer]}))
    monkeypatch.setattr(expert_tiles, "MEASURED", tmp_path / "tiles.json")
    expert_tiles._measured.cache_clear()
    yield
    expert_tiles._measured.cache_clear()


def test_a_number_of_tokens_takes_what_was_measured_for_the_next_larger_one(measured):
    wanted = {1: FEW, 8: FEW, 9: MANY, 64: MANY, 1000: MANY}
    assert {tokens: tiles_for(12, 2, 128, 96, tokens) for tokens in wanted} == wanted


def test_a_shape_that_was_not_measured_takes_higher_tiles_the_more_tokens_an_expert_has(measured):
    rows = [tiles_for(12, 4, 128, 96, tokens).gate_up.rows for tokens in (1, 48, 60, 200, 10_000)]
    assert rows == [16, 16, 32, 128, 128]
    assert all(Tiles(tile, tile) == tiles_for(12, 1, 1, 1, 12 * tile.rows) for tile in USUAL)


def test_the_measured_table_names_tiles_that_the_kernels_can_have():
    table = json.loads(MEASURED.read_text())
    for layer in table["layers"]:
        up_to = [row["up_to_tokens"] for row in layer["tiles"]]
        assert up_to == sorted(set(up_to))
        for row in layer["tiles"]:
            tiles = Tiles(Tile(*row["gate_up"]), Tile(*row["down"]))
            assert tiles.gate_up.rows == tiles.down.rows
            for size in (*tiles.gate_up[:4], *tiles.down[:4]):
                assert size & (size - 1) == 0, "sizes are powers of two"
    assert bool(table["layers"]) == bool(table["device"])
