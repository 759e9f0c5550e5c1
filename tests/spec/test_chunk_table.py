"""Cuts and pieces: everything is covered, nothing is torn where kernels would notice, and everybody finds the same."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from shoal.spec.chunk_table import (
    BOUNDARY_ALIGN_BYTES,
    MAX_PIECE_BYTES,
    MIN_CHUNK_BYTES,
    ChunkTable,
    ParameterPiece,
    build_pieces,
    chunk_boundaries,
)
from shoal.spec.view import Address

HERE = Address(host="127.0.0.1", port=1)


def laid_out(sizes):
    """Tensors side by side as `parallel.flat` lays them out, and where the tail begins."""
    places, end = [], 0
    for size in sizes:
        places.append((end, size))
        end = -(-(end + size) // 64) * 64
    return places, end


models = st.lists(
    st.one_of(st.integers(0, 600), st.integers(0, 40_000), st.sampled_from([512, 4096, 1 << 20, 9_000_000])),
    min_size=1,
    max_size=60,
).filter(any)
"""Sizes of tensors, in numbers of four bytes."""


# ---- cuts ----


@given(models, st.integers(2, 500))
@settings(deadline=None)
def test_chunks_cover_the_flat_buffer_and_the_last_is_the_tail(elements, tail):
    places, end = laid_out([4 * n for n in elements])
    cuts = chunk_boundaries(places, end + 64 * tail)
    assert cuts[0] == 0
    assert cuts[-2:] == [end, end + 64 * tail]
    assert all(a < b for a, b in pairwise(cuts))
    assert cuts == chunk_boundaries(places, end + 64 * tail)


@given(models)
@settings(deadline=None)
def test_chunk_boundaries_in_a_tensor_are_multiples_of_the_grain(elements):
    places, end = laid_out([4 * n for n in elements])
    for point in chunk_boundaries(places, end + 128):
        assert all(
            (point - start) % BOUNDARY_ALIGN_BYTES == 0 for start, size in places if start < point < start + size
        )
        padding = [start + size for start, size in places if start + size < point < -(-(start + size) // 64) * 64]
        assert not padding


@given(models)
@settings(deadline=None)
def test_chunks_are_equal_and_not_too_small(elements):
    places, end = laid_out([4 * n for n in elements])
    sizes = [b - a for a, b in pairwise(chunk_boundaries(places, end + 128))][:-1]
    assert max(sizes) <= 2 * min(sizes)
    assert len(sizes) <= 1000
    assert len(sizes) == 1 or min(sizes) >= MIN_CHUNK_BYTES
    assert len(sizes) > 1 or end < 3 * MIN_CHUNK_BYTES


def test_a_big_model_has_a_thousand_chunks():
    places, end = laid_out([400_000_000])
    sizes = [b - a for a, b in pairwise(chunk_boundaries(places, end + 128))][:-1]
    assert len(sizes) == 1000
    assert max(sizes) - min(sizes) <= BOUNDARY_ALIGN_BYTES


def test_a_small_model_is_one_chunk_and_the_tail():
    assert chunk_boundaries([(0, 4000), (4032, 40)], 4352) == [0, 4096, 4352]


def test_where_nothing_is_trained_there_is_only_a_tail():
    assert chunk_boundaries([], 128) == [0, 128]


# ---- pieces ----


@st.composite
def tables(draw):
    sizes = draw(
        st.lists(st.sampled_from([64, 16 << 10, 300_000, MAX_PIECE_BYTES, 3_000_000]), min_size=1, max_size=40)
    )
    seats = st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True)
    orders = [draw(seats) for _ in sizes]
    held = [draw(st.integers(1, len(order))) for order in orders]
    return ChunkTable(
        number=1,
        cuts=[sum(sizes[:i]) for i in range(len(sizes) + 1)],
        chains=[order[:n] for order, n in zip(orders, held, strict=True)],
        filling=[order[n:] for order, n in zip(orders, held, strict=True)],
        addresses=dict.fromkeys(range(4), HERE),
    )


@given(tables())
def test_pieces_cover_all_chunks_and_never_mix_ways(table):
    found = build_pieces(table)
    assert [piece.index for piece in found] == list(range(len(found)))
    assert [i for piece in found for i in range(piece.first_chunk, piece.end_chunk)] == list(range(len(table.chains)))
    for piece in found:
        assert (piece.start, piece.stop) == (table.cuts[piece.first_chunk], table.cuts[piece.end_chunk])
        assert {tuple(table.chains[i]) for i in range(piece.first_chunk, piece.end_chunk)} == {piece.chain}
        assert {tuple(table.filling[i]) for i in range(piece.first_chunk, piece.end_chunk)} == {piece.filling}
        assert piece.end_chunk == piece.first_chunk + 1 or piece.stop - piece.start <= MAX_PIECE_BYTES
    assert found[-1].first_chunk == len(table.chains) - 1


@given(tables())
def test_pieces_are_no_smaller_than_they_must_be(table):
    found = build_pieces(table)
    for one, other in pairwise(found[:-1]):
        first = table.cuts[other.first_chunk + 1] - table.cuts[other.first_chunk]
        same = (one.chain, one.filling) == (other.chain, other.filling)
        assert not same or one.stop - one.start + first > MAX_PIECE_BYTES


def test_a_record_passes_the_chain_and_then_those_that_are_filled():
    piece = ParameterPiece(0, 0, 1, 0, 64, chain=(4, 2), filling=(7,))
    assert piece.primary == 4
    assert [piece.predecessor(seat) for seat in (4, 2, 7, 9)] == [None, 4, 2, None]
    assert [piece.successor(seat) for seat in (4, 2, 7, 9)] == [2, 7, None, None]


# ---- tables ----


@given(tables())
def test_a_table_comes_over_the_wire_as_it_was(table):
    assert ChunkTable.model_validate_json(table.model_dump_json()) == table
    assert ChunkTable.model_validate(table.model_dump(mode="json")) == table


SOUND = {"number": 1, "cuts": [0, 64, 128], "chains": [[0], [1]], "filling": [[], [0]], "addresses": {0: HERE, 1: HERE}}


@pytest.mark.parametrize(
    "unsound",
    [
        {"cuts": [0, 64]},
        {"cuts": [0, 64, 64]},
        {"chains": [[0], []]},
        {"chains": [[0, 0], [1]]},
        {"chains": [[0], [0]]},
        {"chains": [[0], [2]]},
    ],
)
def test_an_unsound_table_is_refused(unsound):
    assert ChunkTable(**SOUND).primaries() == [0, 1]
    with pytest.raises(ValidationError):
        ChunkTable(**{**SOUND, **unsound})
