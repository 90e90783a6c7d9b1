import torch

from tidegate.base.batch import Batch, Slice, TableUpdate
from tidegate.runner.inputs import apply_tables, build_inputs, store_tokens


def new_store() -> torch.Tensor:
    return torch.full((4, 17), 99, dtype=torch.int32)


def test_rows_are_slices_then_decodes_in_one_flat_token_axis() -> None:
    store = new_store()
    store[3, 8], store[1, 0] = 55, 66
    batch = Batch(1, 1.0, [Slice(2, 4, [10, 11, 12], False), Slice(0, 0, [20, 21], True)], [3, 1], [8, 0], [], [])
    store_tokens(batch, store)
    inputs = build_inputs(batch, store)
    assert inputs.tokens.tolist() == [10, 11, 12, 20, 21, 55, 66]
    assert inputs.positions.tolist() == [4, 5, 6, 0, 1, 8, 0]
    assert inputs.tokens.dtype == inputs.positions.dtype == torch.int64
    assert inputs.rows == ([2, 0, 3, 1], [4, 0, 8, 0], [3, 2, 1, 1])
    assert inputs.sampled.tolist() == [4, 5, 6]
    assert inputs.sampled_slots == [0, 3, 1]
    assert inputs.sampled_positions == [2, 9, 1]


def test_slices_of_prompts_that_go_on_ask_for_no_token() -> None:
    batch = Batch(1, 1.0, [Slice(0, 0, [1, 2], False)], [], [], [], [])
    inputs = build_inputs(batch, new_store())
    assert inputs.sampled.tolist() == inputs.sampled_slots == inputs.sampled_positions == []


def test_a_slices_tokens_and_history_go_to_their_positions_and_nowhere_else() -> None:
    store, expected = new_store(), new_store()
    batch = Batch(1, 1.0, [Slice(2, 3, [7, 8], True, [4, 5, 6]), Slice(1, 2, [9], True)], [0], [0], [], [])
    store_tokens(batch, store)
    expected[2, :5] = torch.tensor([4, 5, 6, 7, 8])
    expected[1, 2] = 9
    assert torch.equal(store, expected)


def test_table_updates_change_the_entries_they_name_and_no_others() -> None:
    table = torch.full((3, 6), -5, dtype=torch.int32)
    apply_tables(table, [TableUpdate(1, 0, [40, 41]), TableUpdate(1, 2, [7]), TableUpdate(2, 5, [3])])
    assert table.tolist() == [[-5] * 6, [40, 41, 7, -5, -5, -5], [-5, -5, -5, -5, -5, 3]]
