"""What every codec promises."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.codecs import size
from shoal.codecs.make import make_codec
from shoal.codecs.residual import Residual
from shoal.errors import JobError
from tests.codecs.codec_cases import (
    ALL,
    COUNTS,
    DGC,
    LOSSY,
    NONE,
    codec_for,
    codec_id,
    decoded,
    encoded,
    gradients,
    output_buffer,
    round_trip,
    shapes_of,
)

each = pytest.mark.parametrize("kind", ALL, ids=codec_id)
each_lossy = pytest.mark.parametrize("kind", LOSSY, ids=codec_id)
few = settings(max_examples=12, deadline=None)
GUARD = 64


@each
@few
@given(values=gradients())
def test_as_many_bytes_as_announced_and_not_one_beside_them(kind, values):
    count, codec = values.numel(), codec_for(kind, values.numel())
    announced = size.size_bytes(kind, count, shapes=shapes_of(count))
    assert codec.size_bytes(count) == announced
    assert codec.residual_floats(count) == size.residual_floats(kind, count, shapes=shapes_of(count))
    whole = [torch.full((announced + 2 * GUARD,), fill, dtype=torch.uint8) for fill in (0, 255)]
    for data in whole:
        codec.encode(values, data[GUARD:-GUARD])
    assert torch.equal(whole[0][GUARD:-GUARD], whole[1][GUARD:-GUARD]), "some bytes were not written"
    assert not whole[0][:GUARD].any()
    assert not whole[0][-GUARD:].any()
    out = torch.full((count + 2,), 5.0)
    codec.decode(whole[0][GUARD:-GUARD], out[1:-1])
    assert out[0] == out[-1] == 5.0


@each
@few
@given(values=gradients(), other=gradients())
def test_the_same_values_give_the_same_bytes_whatever_was_encoded_before(kind, values, other):
    fresh = encoded(codec_for(kind, values.numel()), values)
    used = codec_for(kind, values.numel())
    if kind["kind"] != "lowrank":
        round_trip(used, other)
    assert torch.equal(encoded(used, values.clone()), fresh)


@each
@few
@given(values=gradients(), seed=st.integers(0, 99))
def test_adding_is_decoding_and_then_adding(kind, values, seed):
    codec = codec_for(kind, values.numel())
    data = encoded(codec, values)
    there = torch.randn(values.numel(), generator=torch.Generator().manual_seed(seed))
    expected = there + decoded(codec, data, values.numel())
    codec.decode(data, there, add=True)
    assert torch.equal(there, expected)


@pytest.mark.parametrize("kind", [kind for kind in LOSSY if kind != DGC], ids=codec_id)
@few
@given(count=COUNTS, seed=st.integers(0, 1 << 32), scale=st.sampled_from([1e-20, 1.0, 1e4]))
def test_nothing_is_lost_for_good(kind, count, seed, scale):
    """What was decoded so far and what is remembered add up to the values. (What momentum does is in test_topk.)"""
    codec, memory = codec_for(kind, count), Residual(codec_for(kind, count).residual_floats(count))
    draws = torch.Generator().manual_seed(seed)
    given, got = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    for _ in range(5):
        values = scale * torch.randn(count, generator=draws)
        before, after = memory.before_and_after()
        got += decoded(codec, encoded(codec, values, residual_in=before, residual_out=after), count)
        given += values
        memory.commit()
    left = memory.state()["memory"][:count]
    assert torch.allclose(got + left, given, rtol=0, atol=1e-5 * scale * max(1, math.sqrt(count)) / 4)


@each
@few
@given(values=gradients(), seed=st.integers(0, 99), bad=st.sampled_from([None, math.inf, math.nan]), own=st.booleans())
def test_what_is_read_back_is_what_will_be_decoded(kind, values, seed, bad, own):
    """To the bit, also where it is not finite or a zero has a sign, and nothing else changes by it."""
    count = values.numel()
    codec = codec_for(kind, count)
    if bad is not None and count:
        values[seed % count] = bad
    before = torch.randn(codec.residual_floats(count), generator=torch.Generator().manual_seed(seed))
    for memory in (
        {},
        {"residual_out": torch.empty_like(before)},
        {"residual_in": before, "residual_out": torch.empty_like(before)},
    ):
        data = encoded(codec, values, **memory)
        left = memory.get("residual_out", before).clone()
        given = values.clone()
        back = given if own else torch.full_like(values, 3.0)
        assert torch.equal(encoded(codec, given, **memory, decoded=back), data)
        assert torch.equal(bits(memory.get("residual_out", before)), bits(left))
        assert torch.equal(bits(back), bits(decoded(codec, data, count)))


def bits(values):
    return values.view(torch.int32)


@each_lossy
@few
@given(values=gradients(), seed=st.integers(0, 99))
def test_one_residual_or_two(kind, values, seed):
    """Written in place, the memory becomes the same; and the one from before is left as it was when there are two."""
    codec = codec_for(kind, values.numel())
    before = torch.randn(codec.residual_floats(values.numel()), generator=torch.Generator().manual_seed(seed))
    kept, place, after = before.clone(), before.clone(), torch.full_like(before, 9.0)
    data = encoded(codec, values, residual_in=before, residual_out=after)
    assert torch.equal(encoded(codec, values, residual_in=place, residual_out=place), data)
    assert torch.equal(place, after)
    assert torch.equal(before, kept)


@each_lossy
@few
@given(values=gradients())
def test_nothing_before_is_as_good_as_zeros(kind, values):
    codec = codec_for(kind, values.numel())
    zeros = torch.zeros(codec.residual_floats(values.numel()))
    after, other = torch.full_like(zeros, 9.0), torch.full_like(zeros, 8.0)
    values = values + 0.0  # -0.0 and 0.0 have different bits, and their sum is 0.0
    data = encoded(codec, values, residual_out=after)
    assert torch.equal(encoded(codec, values, residual_in=zeros, residual_out=other), data)
    assert torch.equal(after, other)


@each_lossy
@pytest.mark.parametrize("count", [5, 900])
def test_a_resumed_run_and_a_step_done_twice_give_the_same_bytes(kind, count):
    def step(memory, number):
        before, after = memory.before_and_after()
        values = torch.randn(count, generator=torch.Generator().manual_seed(number))
        return encoded(codec_for(kind, count), values, residual_in=before, residual_out=after)

    floats = codec_for(kind, count).residual_floats(count)
    straight, broken = Residual(floats), Residual(floats)
    expected = []
    for number in range(6):
        expected.append(step(straight, number))
        straight.commit()
    for number in range(6):
        step(broken, 100 + number)  # discarded
        assert torch.equal(step(broken, number), expected[number])
        broken.commit()
        saved = {key: tensor.clone() for key, tensor in broken.state().items()}
        broken = Residual(floats)
        broken.load_state(saved)


@each
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_noticed(kind, bad):
    for count, at in [(1, 0), (50, 49), (300, 7), (1030, 1029), (1030, 0), (1030, 1000)]:
        codec = codec_for(kind, count)
        values = torch.randn(count, generator=torch.Generator().manual_seed(1))
        values[at] = bad
        after = torch.zeros(codec.residual_floats(count))
        for memory in ({}, {"residual_out": after}, {"residual_in": torch.ones_like(after), "residual_out": after}):
            found = decoded(codec, encoded(codec, values, **memory), count)
            assert not found.isfinite().all(), (count, at, list(memory))


@each
@pytest.mark.parametrize("count", [0, 1, 2, 8, 300, 1025])
def test_zeros_stay_zeros(kind, count):
    codec = codec_for(kind, count)
    memory = Residual(codec.residual_floats(count))
    for _ in range(2):
        before, after = memory.before_and_after()
        data = encoded(codec, torch.zeros(count), residual_in=before, residual_out=after)
        assert torch.equal(decoded(codec, data, count), torch.zeros(count))
        assert not after[:count].any()
        memory.commit()


@each
@few
@given(values=gradients())
def test_what_is_finite_stays_finite(kind, values):
    if kind["kind"] == "fp16":
        values = values.clamp(-65504, 65504)  # beyond, it is to become infinite
    assert round_trip(codec_for(kind, values.numel()), values).isfinite().all()


@each
@few
@given(values=gradients(st.integers(1, 3000)), cut=st.integers(0, 3000))
def test_where_the_bytes_lie_does_not_matter(kind, values, cut):
    count, codec = values.numel(), codec_for(kind, values.numel())
    data = encoded(codec, values)
    shift = cut % 16
    moved = torch.zeros(len(data) + 64, dtype=torch.uint8)[4 * shift :][: len(data)]
    moved.copy_(data)
    out = torch.zeros(count + 16)[shift:][:count]
    codec.decode(moved, out)
    assert torch.equal(out, decoded(codec, data, count))


@each
def test_only_float32_is_taken(kind):
    codec = codec_for(kind, 8)
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int32):
        for act in (codec.encode, lambda values, data: codec.decode(data, values)):
            with pytest.raises(JobError, match=r"SH110 codec: codecs take float32") as failure:
                act(torch.zeros(8, dtype=dtype), output_buffer(codec, 8))
            assert str(dtype).removeprefix("torch.") in str(failure.value)


@each
def test_what_does_not_fit_is_refused(kind):
    codec, values = codec_for(kind, 8), torch.zeros(8)
    good, memory = output_buffer(codec, 8), torch.zeros(codec.residual_floats(8))
    gappy = good.new_empty(2 * len(good))[::2]
    bad = [good[:-1], torch.cat([good, good]), good.view(torch.int8), good.view(1, -1), gappy]
    for data in bad:
        with pytest.raises(ValueError, match="bytes"):
            codec.encode(values, data)
        with pytest.raises(ValueError, match="bytes"):
            codec.decode(data, values)
    crooked = torch.empty(len(good) + 1, dtype=torch.uint8)[1:]
    with pytest.raises(ValueError, match="aligned to 4 bytes"):
        codec.encode(values, crooked)
    with pytest.raises(ValueError, match="flat"):
        codec.encode(torch.zeros(16)[::2], good)
    with pytest.raises(ValueError, match="without `residual_out`"):
        codec.encode(values, good, residual_in=memory)
    with pytest.raises(ValueError, match="instead of"):
        codec.encode(values, good, residual_out=torch.zeros(len(memory) + 1))


def test_only_none_is_exact():
    assert [kind for kind in ALL if codec_for(kind, 8).exact] == [NONE]
    values = torch.randn(999)
    values[:3] = torch.tensor([math.nan, math.inf, 1e-45])
    back = round_trip(codec_for(NONE, 999), values)
    assert torch.equal(back.view(torch.int32), values.view(torch.int32))


def test_which_codecs_keep_residuals():
    assert {kind["kind"] for kind in ALL if codec_for(kind, 8).needs_residual} == {
        "int4",
        "int3",
        "sign",
        "topk",
        "lowrank",
    }


def test_nobody_knows_this_one():
    for asked in (lambda: make_codec({"kind": "zip"}), lambda: size.size_bytes({"kind": "zip"}, 1)):
        with pytest.raises(ValueError, match="no codec 'zip'"):
            asked()
