"""Arithmetic of sizes, and that it needs no torch."""

import itertools
import subprocess
import sys
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.codecs.size import matrix_segments, residual_floats, shapes_within, size_bytes

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=6)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"kind": "none"}, 4_000_000),
        ({"kind": "bf16"}, 2_000_000),
        ({"kind": "fp16"}, 2_000_000),
        ({"kind": "int8", "block": 256}, 1_000_000 + 4 * 3907),
        ({"kind": "int4", "block": 64}, 500_000 + 4 * 15625),
        ({"kind": "int3", "block": 256}, 400_000 + 4 * 3907),
        ({"kind": "sign"}, 125_000 + 4 * 977),
        ({"kind": "topk", "keep": 0.01}, 80_000),
        ({"kind": "lowrank", "rank": 4}, 4 * 4 * 2000),
    ],
    ids=lambda it: it["kind"] if isinstance(it, dict) else "",
)
def test_a_million_values(settings, expected):
    assert size_bytes(settings, 1_000_000, shapes=[(1000, 1000)]) == expected


def test_residual_floats():
    assert residual_floats({"kind": "none"}, 100) == 0
    assert residual_floats({"kind": "topk", "keep": 0.1, "momentum": 0.9}, 100) == 200
    assert residual_floats({"kind": "lowrank", "rank": 1}, 100, shapes=[(10, 10)]) == 110


@given(SHAPES, st.integers(1, 4))
def test_parts_lie_side_by_side_and_never_send_more(shapes, rank):
    count = sum(map(prod, shapes))
    parts = matrix_segments(shapes, rank, count)
    assert [part.start for part in parts] == [0, *(part.stop for part in parts)][: len(parts)]
    assert sum(part.count for part in parts) == count
    assert all(part.sent_floats < part.count for part in parts if part.rank)
    assert not any(not a.rank and not b.rank for a, b in itertools.pairwise(parts))


@given(SHAPES, st.data())
def test_pieces_hold_what_the_whole_holds(shapes, data):
    """However it is cut."""
    count = sum(map(prod, shapes))
    cuts = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=4))})
    found = [list(shapes_within(shapes, a, b)) for a, b in itertools.pairwise(cuts)]
    assert [sum(map(prod, piece)) for piece in found] == [b - a for a, b in itertools.pairwise(cuts)]
    whole = [shape if len(shape) > 1 else (prod(shape),) for shape in shapes if prod(shape)]
    assert list(shapes_within(shapes, 0, count)) == whole


def test_a_cut_matrix_keeps_its_whole_rows():
    assert list(shapes_within([(4, 10), (7,)], 5, 43)) == [(5,), (3, 10), (3,)]
    assert list(shapes_within([(4, 10), (7,)], 5, 33)) == [(5,), (2, 10), (3,)]
    assert list(shapes_within([(4, 10)], 12, 18)) == [(6,)]
    assert list(shapes_within([(4, 10)], 12, 25)) == [(13,)]
    assert list(shapes_within([(4, 5, 2)], 10, 40)) == [(3, 5, 2)]


def test_shapes_must_fill_the_buffer():
    with pytest.raises(ValueError, match="hold 6 values, but 7"):
        matrix_segments([(2, 3)], 1, 7)


def test_planners_need_no_torch():
    code = "import sys, shoal.codecs.size; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
