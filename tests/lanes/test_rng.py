"""Seeds for every generator, and the look that spares most of them."""

import random

import numpy as np
import pytest
import torch

from shoal.lanes.rng import LaneRng, numpy_state_probe, python_state_probe

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
    rng = LaneRng(torch.device("cpu"))
    rng.seed_lane(1, 2)
    assert not rng.drew_unseeded()
    draw()
    assert rng.drew_unseeded()
    rng.seed_lane(1, 2)
    a = draw()
    rng.seed_lane(1, 2)
    assert draw() == a
    assert not rng.drew_unseeded()


def test_torch_is_seeded_without_a_look():
    rng = LaneRng(torch.device("cpu"))
    rng.seed_lane(1, 2)
    a = torch.rand(3)
    rng.seed_lane(1, 2)
    assert torch.equal(torch.rand(3), a)
    assert not rng.drew_unseeded()


def test_memory_that_is_not_what_we_think_means_seeding_every_time(monkeypatch):
    monkeypatch.setattr("shoal.lanes.rng.python_state_probe", lambda: lambda: (0, 0))
    rng = LaneRng(torch.device("cpu"))
    rng.seed_lane(1, 2)
    a = random.random()
    rng.seed_lane(1, 2)
    assert random.random() == a


def test_probes_are_stable():
    for probe in (python_state_probe(), numpy_state_probe()):
        assert probe() == probe()
