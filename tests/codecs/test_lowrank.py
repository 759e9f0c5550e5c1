"""Matrices as products of two thin ones."""

import math

import pytest
import torch

from shoal.codecs.codec import ScratchBuffers
from shoal.codecs.lowrank import hash_uniform
from shoal.codecs.make import make_codec
from shoal.codecs.residual import Residual
from tests.codecs.codec_cases import decoded, encoded, round_trip


def lowrank(rank, *shapes):
    return make_codec({"kind": "lowrank", "rank": rank}, shapes=shapes)


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("scale", [1e-18, 1.0, 1e18])
def test_a_matrix_of_the_rank_comes_back(scale):
    matrix = scale * random(40, 3) @ random(3, 50)
    back = round_trip(lowrank(3, (40, 50)), matrix.view(-1))
    assert torch.allclose(back.view(40, 50), matrix, rtol=0, atol=1e-5 * scale)


def test_a_lower_rank_than_asked_for_does_not_come_back_larger():
    for rank in (1, 2):
        matrix = random(40, rank) @ random(rank, 50)
        back = round_trip(lowrank(4, (40, 50)), matrix.view(-1))
        assert torch.allclose(back.view(40, 50), matrix, rtol=0, atol=1e-4)


def test_vectors_and_small_matrices_stay_as_they_are():
    values = random(7 + 12 + 400 + 5)
    back = round_trip(lowrank(2, (7,), (3, 4), (20, 20), (5,)), values)
    assert torch.equal(back[:19], values[:19])
    assert torch.equal(back[-5:], values[-5:])
    assert not torch.equal(back[19:-5], values[19:-5])


def test_it_comes_to_hold_the_main_directions():
    """The same matrix again and again, without what was lost: as good as its singular vectors allow."""
    matrix = random(60, 80)
    u, s, v = torch.linalg.svd(matrix)
    best = matrix - u[:, :4] * s[:4] @ v[:4]
    codec, memory = lowrank(4, (60, 80)), Residual(4800 + 320)
    off = []
    for _ in range(80):
        before, after = memory.before_and_after()
        back = decoded(codec, encoded(codec, matrix.view(-1), residual_in=before, residual_out=after), 4800)
        after[:4800] = 0.0
        memory.commit()
        off.append((matrix - back.view(60, 80)).norm() / best.norm())
    assert off[0] > 1.02
    assert off[-1] < 1.005


def test_a_direction_that_was_lost_is_found_again():
    codec, memory = lowrank(2, (20, 30)), Residual(660)
    for values in (random(600), torch.zeros(600), torch.zeros(600), random(20, 2) @ random(2, 30)):
        before, after = memory.before_and_after()
        back = decoded(codec, encoded(codec, values.view(-1), residual_in=before, residual_out=after), 600)
        after[:600] = 0.0
        memory.commit()
    assert torch.allclose(back, values.view(-1), rtol=0, atol=1e-4)


def test_directions_that_are_not_finite_start_anew():
    codec, before, after = lowrank(2, (20, 30)), torch.zeros(660), torch.zeros(660)
    before[600:] = torch.tensor([math.nan, 1.0]).repeat(30)
    back = decoded(codec, encoded(codec, random(600), residual_in=before, residual_out=after), 600)
    assert back.isfinite().all()
    assert after.isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_matrix_that_is_not_finite_decodes_to_nan_and_others_do_not(bad):
    values = random(600 + 600 + 9)
    values[700] = bad
    first, second, vector = round_trip(lowrank(2, (20, 30), (30, 20), (9,)), values).split([600, 600, 9])
    assert first.isfinite().all()
    assert second.isnan().all()
    assert torch.equal(vector, values[-9:])


def test_shapes_must_fill_the_buffer():
    codec = lowrank(2, (4, 4), (3,))
    with pytest.raises(ValueError, match="hold 19 values, but 20"):
        codec.size_bytes(20)


def test_codecs_of_one_thread_share_their_scratch():
    scratch, settings = ScratchBuffers(), {"kind": "lowrank", "rank": 2}
    values = random(600)
    one, other = (make_codec(settings, shapes=[shape], scratch=scratch) for shape in ((20, 30), (30, 20)))
    data = [encoded(codec, values) for codec in (one, other)]
    expected = [round_trip(lowrank(2, shape), values) for shape in ((20, 30), (30, 20))]
    for codec, sent, back in zip((one, other), data, expected, strict=True):
        assert torch.equal(decoded(codec, sent, 600), back)


def test_the_first_directions_have_no_pattern():
    numbers = hash_uniform(10_000, torch.device("cpu"))
    assert numbers.abs().max() <= 1
    assert len(numbers.unique()) > 9_900
    assert numbers.mean().abs() < 0.03
    side_by_side = torch.corrcoef(torch.stack([numbers[:-1], numbers[1:]]))[0, 1]
    assert side_by_side.abs() < 0.03
