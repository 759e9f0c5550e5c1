"""A range of the values from a part of the encoded bytes: the same bits as from all of them."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.codecs import blockwise, packed_int
from shoal.codecs.codec import ScratchBuffers
from shoal.codecs.make import make_codec

CODECS = [
    {"kind": "none"},
    {"kind": "bf16"},
    {"kind": "fp16"},
    {"kind": "int8", "block": 256},
    {"kind": "int4", "block": 32},
    {"kind": "int3", "block": 32},
    {"kind": "sign"},
    {"kind": "topk", "keep": 0.1},
    {"kind": "topk", "keep": 1.0},
    {"kind": "lowrank", "rank": 2},
]
SHAPES = [(64, 48), (7,), (40, 100), (3, 3), (16, 1)]
COUNT = sum(torch.Size(shape).numel() for shape in SHAPES)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """So that a few thousand values are many pieces and groups."""
    monkeypatch.setattr(blockwise, "PIECE", 1024)
    monkeypatch.setattr(packed_int, "GROUP_VALUES", 1024)


def encoded(settings, seed=0):
    codec = make_codec(settings, shapes=SHAPES, scratch=ScratchBuffers())
    values = torch.randn(COUNT, generator=torch.Generator().manual_seed(seed))
    data = torch.empty(codec.size_bytes(COUNT), dtype=torch.uint8)
    codec.encode(values, data)
    whole = torch.empty(COUNT)
    codec.decode(data, whole)
    return codec, data, whole


@pytest.mark.parametrize("codec_settings", CODECS, ids=lambda it: "-".join(map(str, it.values())))
def test_any_range(codec_settings):
    codec, data, whole = encoded(codec_settings)

    @settings(max_examples=40, deadline=None)
    @given(st.tuples(st.integers(0, COUNT), st.integers(0, COUNT)).filter(lambda it: it[0] != it[1]), st.integers(0, 3))
    def check(ends, misaligned):
        start, stop = sorted(ends)
        parts = torch.cat(codec.cut(data, COUNT, start, stop))
        out, rest = torch.full((stop - start,), torch.nan), torch.zeros(misaligned + len(parts) + 5, dtype=torch.uint8)
        sent = rest[misaligned:]
        sent[: len(parts)] = parts
        assert codec.decode_cut(sent, COUNT, start, stop, out) == len(parts) <= codec.max_cut_bytes(COUNT, start, stop)
        assert torch.equal(out.view(torch.int32), whole[start:stop].view(torch.int32))
        with pytest.raises(ValueError, match="bytes of encoded values"):
            codec.decode_cut(parts[:-1].clone(), COUNT, start, stop, out)

    check()


def test_ranges_cost_little_more_than_the_whole():
    for codec_settings in CODECS:
        codec, data, _ = encoded(codec_settings)
        ends = [COUNT * i // 4 for i in range(5)]
        sizes = [sum(map(len, codec.cut(data, COUNT, a, b))) for a, b in pairwise(ends)]
        assert sum(sizes) < 2.5 * len(data) + 64


@pytest.mark.parametrize(
    "spoilt", [[-1], [999], [2, 5, 4, 0, 0], [2, 4, 4, 0, 0], [1, 99, 0], [1, -5, 0], [1, 200, 0], [1 << 30]]
)
def test_indices_of_other_values_are_refused(spoilt):
    codec = make_codec({"kind": "topk", "keep": 0.5})
    data = torch.tensor(spoilt, dtype=torch.int32).view(torch.uint8)
    with pytest.raises(ValueError, match="values"):
        codec.decode_cut(data, 1000, 100, 200, torch.empty(100))
