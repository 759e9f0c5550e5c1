"""Seeds for every generator, and the look that spares most of them."""

import random

import numpy as np
import pytest
import torch

from shoal.parallel.randomness import Chance, numpy_mark, python_mark

DRAWS = [
    random.random,
    lambda: random.getrandbits(1),
    lambda: random.shuffle([1, 2, 3]),
    lambda: random.gauss(0, 1),
    lambda: [random.random() for _ in range(312)],  # the position is where it was
    lambda: np.random.random(),
    lambda: np.random.randint(3),
    lambda: np.random.standard_normal(),
    lambda: np.random.bytes(624 * 4),
]


@pytest.mark.parametrize("draw", DRAWS)
def test_every_draw_is_seen(draw):
    chance = Chance(torch.device("cpu"))
    chance.for_lane(1, 2)
    assert not chance.missed()
    draw()
    assert chance.missed()
    chance.for_lane(1, 2)
    a = draw()
    chance.for_lane(1, 2)
    assert draw() == a
    assert not chance.missed()


def test_torch_is_seeded_without_a_look():
    chance = Chance(torch.device("cpu"))
    chance.for_lane(1, 2)
    a = torch.rand(3)
    chance.for_lane(1, 2)
    assert torch.equal(torch.rand(3), a)
    assert not chance.missed()


def test_memory_that_is_not_what_we_think_means_seeding_every_time(monkeypatch):
    monkeypatch.setattr("shoal.parallel.randomness.python_mark", lambda: lambda: (0, 0))
    chance = Chance(torch.device("cpu"))
    chance.for_lane(1, 2)
    a = random.random()
    chance.for_lane(1, 2)
    assert random.random() == a


def test_marks_are_stable():
    for mark in (python_mark(), numpy_mark()):
        assert mark() == mark()
