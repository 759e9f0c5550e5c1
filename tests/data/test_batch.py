"""Batches in parts."""

import pytest
import torch

from shoal.data.batch import Batch


def test_a_batch_is_unpacked_as_that_of_a_loader():
    x, y = batch = Batch((torch.zeros(2, 3),), torch.ones(2), 2)
    assert (x, y) == (batch[0], batch[1]) == (batch.inputs[0], batch.target)
    assert Batch(({"ids": x},), y, 2)["ids"] is x


@pytest.mark.parametrize(
    ("size", "count", "sizes"), [(6, 4, [1, 2, 1, 2]), (6, 3, [2, 2, 2]), (2, 4, [1, 1]), (5, 1, [5])]
)
def test_parts_have_every_sample_once_and_in_order(size, count, sizes):
    rows, table = torch.arange(size * 2).view(size, 2), torch.arange(7)
    parts = Batch(({"rows": rows, "table": table},), [rows[:, 0], "word"], size).chunk(count)
    assert [part.size for part in parts] == sizes
    assert torch.equal(torch.cat([part.inputs[0]["rows"] for part in parts]), rows)
    assert torch.equal(torch.cat([part.target[0] for part in parts]), rows[:, 0])
    assert all(part.target[1] == "word" and torch.equal(part.inputs[0]["table"], table) for part in parts)
