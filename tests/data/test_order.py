"""The batches of a run over the rows that it can use."""

import pytest

from cookbook.core.errors import DataError
from cookbook.data.order import Batches, order_index


def test_every_epoch_has_every_row_once_and_its_last_batch_what_is_left():
    batches = Batches(length=10, left_out=(), batch_size=4, seed=3)
    assert (batches.rows_per_epoch, batches.steps_per_epoch) == (10, 3)
    epochs = [[batches.at(step) for step in range(start, start + 3)] for start in (0, 3, 6)]
    assert [[len(batch) for batch in epoch] for epoch in epochs] == [[4, 4, 2]] * 3
    for epoch, parts in enumerate(epochs):
        assert [index for batch in parts for index in batch] == [
            order_index(position, 10, 3) for position in range(10 * epoch, 10 * epoch + 10)
        ]


def test_rows_that_are_left_out_change_nothing_else_in_the_order():
    whole, reduced = Batches(10, (), 10, 3).at(0), Batches(10, {6, 4}, 10, 3)
    assert reduced.at(0) == [index for index in whole if index not in (4, 6)]
    assert Batches(10, {6, 4}, 3, 3).at(1) == reduced.at(0)[3:6]


def test_no_row_at_all_is_an_error():
    with pytest.raises(DataError, match="no row that can be used"):
        Batches(2, {0, 1}, 4, 0)
