"""How far off the codecs are that treat each value or block by itself."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.codecs import blockwise
from shoal.codecs.int8 import MIN_SCALE
from shoal.codecs.make import make_codec
from shoal.codecs.size import SIGN_BLOCK
from tests.codecs.codec_cases import BF16, FP16, INT3, INT4, INT8, SIGN, codec_id, encoded, gradients, round_trip

few = settings(max_examples=25, deadline=None)


@few
@given(values=gradients())
def test_bf16_keeps_eight_bits_and_the_range(values):
    off = (round_trip(make_codec(BF16), values) - values).abs()
    assert (off <= values.abs() * 2.0**-8 + 2.0**-133).all()


@few
@given(values=gradients())
def test_fp16_keeps_eleven_bits_of_a_smaller_range(values):
    back = round_trip(make_codec(FP16), values)
    inside = values.abs() < 65520
    assert back[~inside].isinf().all()
    off = (back - values).abs()[inside]
    assert (off <= values.abs()[inside] * 2.0**-11 + 2.0**-24).all()


@few
@given(values=gradients(st.integers(1, 3000)), block=st.sampled_from([1, 2, 7, 64, 256, 1000]))
def test_int8_is_off_by_half_a_step_of_its_block(values, block):
    back = round_trip(make_codec({"kind": "int8", "block": block}), values)
    for mine, original in zip(back.split(block), values.split(block), strict=True):
        largest = original.abs().max()
        if largest < MIN_SCALE:
            assert not mine.any()
        else:
            assert ((mine - original).abs() <= largest / 253.9).all()


@few
@given(values=gradients(st.integers(1, 3000)), block=st.sampled_from([2, 10, 64, 1000]))
def test_int4_is_off_by_half_a_step_of_its_block(values, block):
    back = round_trip(make_codec({"kind": "int4", "block": block}), values)
    for mine, original in zip(back.split(block), values.split(block), strict=True):
        step = float(original.abs().max()) / 7
        if step < 0.999 * MIN_SCALE:
            assert not mine.any()
        elif step > 1.001 * MIN_SCALE:
            assert ((mine.double() - original.double()).abs() <= 0.5001 * step).all()


@few
@given(values=gradients(st.integers(1, 3000)), block=st.sampled_from([1, 7, 64, 1000]))
def test_int3_cuts_off_what_is_large_for_its_block(values, block):
    back = round_trip(make_codec({"kind": "int3", "block": block}), values)
    for mine, original in zip(back.split(block), values.split(block), strict=True):
        size = original.abs().double()
        step = max(float(size.max()) / 8, 0.88 * float(size.mean()))
        if step < 0.999 * MIN_SCALE:
            assert not mine.any()
        elif step > 1.001 * MIN_SCALE:
            expected = original.double().clamp(-3 * step, 3 * step)
            assert ((mine - expected).abs() <= 0.5001 * step).all()


@few
@given(values=gradients())
def test_sign_sends_signs_times_the_mean_size(values):
    back = round_trip(make_codec(SIGN), values)
    for mine, original in zip(back.split(SIGN_BLOCK), values.split(SIGN_BLOCK), strict=True):
        expected = torch.copysign(original.abs().mean(), original)
        assert torch.allclose(mine, expected, rtol=1e-5, atol=1e-44)


@pytest.mark.parametrize("kind", [INT8, INT4, INT3, SIGN], ids=codec_id)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_with_a_value_that_is_not_finite_is_lost_and_no_other(kind, bad):
    width = kind.get("block", SIGN_BLOCK)
    values = torch.randn(11 * width, generator=torch.Generator().manual_seed(0))
    values[width + 3] = bad
    before, spoilt, behind = round_trip(make_codec(kind), values).split([width, width, 9 * width])
    assert before.isfinite().all()
    assert behind.isfinite().all()
    assert not spoilt.isfinite().any()


@pytest.mark.parametrize("kind", [INT8, INT4, INT3, SIGN], ids=codec_id)
def test_values_of_any_size(kind):
    means = kind in (SIGN, INT3)  # of sizes: their sum must be finite
    for size in (3e38, 1e38, 1e-37, 1e-44):
        values = torch.full((256,), min(size, 1e35) if means else size)
        back = round_trip(make_codec(kind), values)
        expected = values if size > MIN_SCALE or kind is SIGN else back * 0
        assert torch.allclose(back, expected, rtol=0.13 if kind is INT3 else 1e-5, atol=0)


@pytest.mark.parametrize("kind", [BF16, INT8, {"kind": "int8", "block": 300}, INT4, INT3, SIGN], ids=codec_id)
def test_pieces_change_nothing(kind, monkeypatch):
    values = torch.randn(10_007, generator=torch.Generator().manual_seed(0))
    whole = encoded(make_codec(kind), values, residual_out=(kept := torch.zeros(10_007)))
    monkeypatch.setattr(blockwise, "PIECE", 2048)
    assert torch.equal(encoded(make_codec(kind), values, residual_out=(again := torch.ones(10_007))), whole)
    assert torch.equal(kept, again)


@given(st.integers(0, 5000), st.sampled_from([1, 8, 7, 300, 4096]))
@few
def test_pieces_cover_everything_and_end_at_blocks(count, width):
    device = torch.device("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "PIECE", 1000)
        cuts = list(blockwise.pieces(count, width, device))
    assert [start for start, _ in cuts] == [0, *(stop for _, stop in cuts)][: len(cuts)]
    assert (cuts[-1][1] if cuts else 0) == count
    assert all(stop % width == 0 for _, stop in cuts[:-1])
    assert all(stop - start == count % width or (stop - start) % width == 0 for start, stop in cuts)
