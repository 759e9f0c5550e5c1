"""The table as a user sees it."""

import copy

import numpy as np
import pytest
import torch

from shoal import SparseTable
from shoal.errors import ShoalError
from shoal.lanes.sparse.embedding import InitialRows


@pytest.fixture
def table():
    made = SparseTable(1000, 3, init=1.0)
    made.bind(InitialRows(), chunks=5)
    return made


@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 0), (2, 2, 2)])
def test_a_vector_for_each_number(table, shape):
    ids = torch.randint(0, 1000, shape)
    out = table(ids)
    assert out.shape == (*shape, 3)
    again = table(ids.flatten().flip(0)).flip(0).reshape(*shape, 3)
    assert torch.equal(out, again)


def test_gradients_like_an_embeddings(table):
    ids = torch.tensor([[5, 7, 5], [9, 5, 999]])
    dense = torch.nn.Embedding.from_pretrained(table(torch.arange(1000)).detach(), freeze=False)
    table.take_gradients()
    weight = torch.randn(2, 3, 3)
    for module in (table, dense):
        ((module(ids) * weight).sum() + module(torch.tensor([7])).square().sum()).backward()
    found = table.take_gradients()
    at = {int(key) & (1 << 48) - 1: value for key, value in zip(found.keys, found.values, strict=True)}
    assert sorted(at) == [5, 7, 9, 999]
    for number, value in at.items():
        np.testing.assert_allclose(value, dense.weight.grad[number].numpy(), rtol=1e-5)
    assert not len(table.take_gradients())


def test_nothing_is_kept_without_gradients(table):
    with torch.no_grad():
        assert not table(torch.tensor([1])).requires_grad
    assert not table._used


@pytest.mark.parametrize("wrong", [[-1], [1000], [3, 10**12]])
def test_rows_that_are_not_there(table, wrong):
    with pytest.raises(IndexError, match="of a SparseTable of 1000 rows"):
        table(torch.tensor(wrong))


def test_numbers_are_whole(table):
    with pytest.raises(TypeError, match="are integers"):
        table(torch.tensor([1.0]))


def test_without_servers(table):
    with pytest.raises(ShoalError, match="SH419"):
        copy.deepcopy(table)(torch.tensor([1]))


def test_no_such_table():
    with pytest.raises(ValueError, match="optimizer of a table"):
        SparseTable(10, 2, optimizer="adam")
