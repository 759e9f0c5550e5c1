"""Orders are bijections, pure, and random enough."""

from __future__ import annotations

from collections import Counter
from math import factorial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.permutation import BlockShuffle, Permutation, block_edges, random_ids
from shoal.spec.seeds import derive_seed

PINNED = [5, 9, 0, 7, 8, 4, 2, 3, 6, 1]
keys = st.integers(0, 2**64 - 1)


def test_mix_is_the_same_for_ever():
    assert (derive_seed(0), derive_seed(1, 2, 3)) == (0x910A2DEC89025CC1, 0x1072DECA7455826)
    assert Permutation(10, 1)(np.arange(10)).tolist() == PINNED
    assert derive_seed(1, 2) != derive_seed(2, 1)
    assert derive_seed(1) != derive_seed(1, 0)
    assert len({derive_seed(seed, epoch) for seed in range(50) for epoch in range(50)}) == 2500
    assert all(0 <= derive_seed(number) < 2**64 for number in (-1, 0, 2**70))


@given(n=st.integers(1, 5000), key=keys)
def test_a_permutation_has_every_place_once(n, key):
    assert np.array_equal(np.sort(Permutation(n, key)(np.arange(n))), np.arange(n))


@given(n=st.integers(1, 5000), key=keys, data=st.data())
def test_a_permutation_is_the_same_whatever_is_asked_first(n, key, data):
    asked = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=20)), dtype=np.int64)
    assert np.array_equal(Permutation(n, key)(asked), Permutation(n, key)(np.arange(n))[asked])


@pytest.mark.parametrize("n", [2**22 + 1, 2**33, 2**40 + 12345])
def test_a_huge_permutation_needs_no_memory(n):
    positions = np.unique(random_ids(n, 2000, key=3))
    places = Permutation(n, 7)(positions)
    assert len(np.unique(places)) == len(positions)
    assert places.min() >= 0
    assert n // 2 < places.max() < n


@pytest.mark.parametrize("n", [3, 4, 5])
def test_all_permutations_of_a_few_are_about_as_likely(n):
    draws = 40 * factorial(n)
    seen = Counter(tuple(Permutation(n, derive_seed(99, key))(np.arange(n)).tolist()) for key in range(draws))
    chi = sum((seen[p] - 40) ** 2 / 40 for p in seen) + 40 * (factorial(n) - len(seen))
    freedom = factorial(n) - 1
    assert chi < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("n", [64, 100, 1024])
def test_a_position_goes_everywhere(n):
    """Chi-square over (position, place) in 8 × 8 cells, over many keys."""
    cells = np.zeros((8, 8))
    positions = np.arange(n)
    for key in range(400):
        np.add.at(cells, (positions * 8 // n, Permutation(n, derive_seed(5, key))(positions) * 8 // n), 1)
    rows = np.bincount(positions * 8 // n)
    expected = 400 * np.outer(rows, rows) / n
    assert ((cells - expected) ** 2 / expected).sum() < 49 + 4 * 98**0.5


def test_neighbours_are_parted():
    places = Permutation(60_000, 1)(np.arange(60_000))
    assert abs(np.corrcoef(places[:-1], places[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(np.arange(60_000), places)[0, 1]) < 0.02


def test_other_keys_give_other_orders():
    first, second = (Permutation(1000, key)(np.arange(1000)) for key in (1, 2))
    assert (first == second).sum() < 20


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    open_blocks=st.integers(1, 6),
    key=keys,
    keep=st.floats(0.05, 1),
)
def test_a_block_order_is_a_permutation_that_opens_few_blocks(sizes, open_blocks, key, keep):
    starts = np.cumsum([0, *sizes[:-1]])
    ids = np.unique(random_ids(sum(sizes), max(1, int(keep * sum(sizes))), key=key))
    edges = block_edges(ids, starts)
    places = BlockShuffle(edges, open_blocks=open_blocks, key=key)(np.arange(len(ids)))
    assert np.array_equal(np.sort(places), np.arange(len(ids)))

    blocks = np.searchsorted(starts, ids[places], side="right") - 1
    _, first_use, used = np.unique(blocks, return_index=True, return_counts=True)
    last_use = len(blocks) - 1 - np.unique(blocks[::-1], return_index=True)[1]
    for position in range(len(blocks)):
        assert ((first_use <= position) & (position <= last_use)).sum() <= open_blocks
    assert used.sum() == len(ids)


@given(key=keys, data=st.data())
def test_a_block_order_is_pure(key, data):
    edges = np.array([0, 10, 30, 35, 100])
    asked = np.array(data.draw(st.lists(st.integers(0, 99), max_size=30)), dtype=np.int64)
    whole = BlockShuffle(edges, open_blocks=2, key=key)(np.arange(100))
    assert np.array_equal(BlockShuffle(edges, open_blocks=2, key=key)(asked), whole[asked])


def test_one_window_of_all_blocks_mixes_them():
    edges = np.arange(0, 1001, 100)
    places = BlockShuffle(edges, open_blocks=10, key=4)(np.arange(1000))
    assert len(np.unique(places[:100] // 100)) > 5


def test_a_window_of_eight_blocks_mixes_as_a_reader_that_shuffles_eight_groups():
    """Rows that are neighbours in storage come as far apart, and a batch has rows of as many groups."""
    groups, rows, keys = 64, 50, range(12)
    edges = np.arange(0, groups * rows + 1, rows)

    def shuffled_by_a_reader(key):
        rng = np.random.default_rng(key)
        order = rng.permutation(groups).reshape(-1, 8)
        taken = [(window[:, None] * rows + np.arange(rows)).ravel() for window in order]
        return np.concatenate([rng.permutation(ids) for ids in taken])

    def mixing(order):
        place = np.argsort(order)
        apart = np.abs(place[1:] - place[:-1])[(np.arange(1, len(order)) % rows) != 0]
        batches = (order // rows).reshape(-1, 32)
        return apart.mean(), np.mean([len(np.unique(batch)) for batch in batches])

    places = np.arange(groups * rows)
    own = np.mean([mixing(BlockShuffle(edges, open_blocks=8, key=key)(places)) for key in keys], axis=0)
    reader = np.mean([mixing(shuffled_by_a_reader(key)) for key in keys], axis=0)
    np.testing.assert_allclose(own, reader, rtol=0.02)
    fewer = np.mean([mixing(BlockShuffle(edges, open_blocks=4, key=key)(places)) for key in keys], axis=0)
    assert (fewer < 0.7 * reader).all()


def test_draws_are_with_replacement_and_even():
    drawn = random_ids(10, 10_000, key=1)
    assert np.bincount(drawn, minlength=10).min() > 880
    assert not np.array_equal(drawn, random_ids(10, 10_000, key=2))
