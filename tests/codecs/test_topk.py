"""The k largest, exactly, however they are found."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.codecs import topk
from shoal.codecs.codec import ScratchBuffers
from shoal.codecs.make import make_codec
from shoal.codecs.residual import Residual
from shoal.codecs.size import topk_count
from tests.codecs.codec_cases import DGC, TOPK, decoded, encoded, gradients, round_trip


def largest_by_sorting(values, k):
    """By falling size, NaN before everything; of equal ones the first."""
    sizes = values.abs().nan_to_num(nan=math.inf) + 0.0
    order = sorted(range(len(values)), key=lambda i: (-sizes[i].item(), not values[i].isnan(), i))
    return sorted(order[:k])


@settings(max_examples=30, deadline=None)
@given(values=gradients(st.integers(1, 2000)), share=st.floats(0, 1), samples=st.sampled_from([16, 100, 1 << 14]))
def test_the_k_largest(values, share, samples):
    k = max(1, round(share * values.numel()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topk, "SAMPLES", samples)
        found = topk.topk_indices(values, k, ScratchBuffers())
    assert found.tolist() == largest_by_sorting(values, k)


@pytest.mark.parametrize("samples", [16, 1 << 14])
@pytest.mark.parametrize(
    "values",
    [
        torch.zeros(5000),
        torch.ones(5000),
        -torch.ones(5000),
        torch.cat([torch.zeros(4990), torch.ones(10)]),
        torch.cat([torch.ones(2000), 2 * torch.ones(3000)]),
        torch.arange(5000.0),
        torch.full((5000,), math.nan),
        torch.cat([torch.full((60,), math.nan), torch.full((60,), -math.inf), torch.arange(100.0)]),
    ],
    ids=["zeros", "ones", "minus ones", "ten", "two sizes", "rising", "NaN", "not finite"],
)
def test_samples_that_mislead(values, samples, monkeypatch):
    monkeypatch.setattr(topk, "SAMPLES", samples)
    for k in (1, 50, len(values) - 1, len(values)):
        assert topk.topk_indices(values, k, ScratchBuffers()).tolist() == largest_by_sorting(values, k)


def test_many_values():
    values = torch.randn(300_001, generator=torch.Generator().manual_seed(0))
    found = topk.topk_indices(values, 3000, ScratchBuffers())
    assert found.tolist() == values.abs().topk(3000).indices.sort().values.tolist()


def test_what_is_sent_is_exact_and_the_rest_is_zero():
    values = torch.tensor([0.5, -3.0, 0.0, 2.0, -0.25])
    assert round_trip(make_codec({"kind": "topk", "keep": 0.4}), values).tolist() == [0.0, -3.0, 0.0, 2.0, 0.0]


def test_what_is_not_finite_is_sent_and_forgotten():
    codec, memory = make_codec({"kind": "topk", "keep": 0.4}), Residual(5)
    before, after = memory.before_and_after()
    values = torch.tensor([1.0, math.nan, 2.0, 3.0, -math.inf])
    data = encoded(codec, values, residual_in=before, residual_out=after)
    assert decoded(codec, data, 5).tolist() == pytest.approx([0.0, math.nan, 0.0, 0.0, -math.inf], nan_ok=True)
    assert after.tolist() == [1.0, 0.0, 2.0, 3.0, 0.0]


def test_everything_is_sent_sooner_or_later():
    codec, memory, got = make_codec({"kind": "topk", "keep": 0.1}), Residual(40), torch.zeros(40)
    values = torch.arange(1.0, 41.0)
    for step in range(200):
        before, after = memory.before_and_after()
        codec.decode(
            encoded(codec, values if step < 50 else values * 0, residual_in=before, residual_out=after), got, add=True
        )
        memory.commit()
    assert torch.equal(got, 50 * values)


def test_momentum_is_that_of_deep_gradient_compression():
    """Against its formulas, written out plainly."""
    codec, memory, count = make_codec(DGC), Residual(600), 300
    draws = torch.Generator().manual_seed(0)
    velocity, waiting = torch.zeros(count), torch.zeros(count)
    for _ in range(6):
        values = torch.randn(count, generator=draws)
        velocity = velocity * 0.9 + values
        waiting = waiting + velocity
        chosen = waiting.abs().topk(topk_count(count, 0.1)).indices
        expected = torch.zeros(count).index_copy(0, chosen, waiting[chosen])
        waiting[chosen], velocity[chosen] = 0.0, 0.0
        before, after = memory.before_and_after()
        assert torch.equal(
            decoded(codec, encoded(codec, values, residual_in=before, residual_out=after), count), expected
        )
        memory.commit()
        assert torch.equal(memory.state()["memory"], torch.cat([waiting, velocity]))


def test_how_many_are_kept():
    assert [topk_count(count, 0.01) for count in (0, 1, 149, 151, 10_000)] == [0, 1, 1, 2, 100]
    assert topk_count(7, 1.0) == 7
    assert make_codec(TOPK).size_bytes(10_000_000) == 800_000


def test_an_index_outside_the_buffer_is_refused():
    codec = make_codec({"kind": "topk", "keep": 0.5})
    data = encoded(codec, torch.ones(4))
    data.view(torch.int32)[0] = 4
    with pytest.raises(IndexError):
        codec.decode(data, torch.zeros(4))
