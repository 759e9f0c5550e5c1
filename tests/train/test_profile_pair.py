"""Two workers for a moment: both train, and one that dies is not waited for."""

import os

import pytest
import torch
from torch import nn

from shoal.lanes.replica import Replica
from shoal.train import profile_pair as module
from shoal.train.profile_pair import lower_quartile, profile_pair


@pytest.fixture
def replica():
    model = nn.Linear(8, 4)
    return Replica(model, torch.optim.SGD(model.parameters(), lr=0.01), lambda m, x: m(x).square().mean(), seed=0)


def has_children():
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def test_both_train_and_nothing_is_left(replica):
    before = has_children()
    found = profile_pair(replica, torch.ones(2, 8), budget_s=0.0)
    assert found.lane_cpu_s > 0
    assert found.exchange_s > 0
    assert has_children() == before


def dies_at_once(train):
    return lambda *_, seat, **__: os._exit(1) if seat == 1 else train(*_, seat=seat, **__)


def dies_when_it_has_said_where_it_is(train):
    view = module._view

    def say_and_die(mine, other, seat):
        found = view(mine, other, seat)
        return os._exit(1) if seat == 1 else found

    module._view = say_and_die
    return train


@pytest.mark.parametrize("dies", [dies_at_once, dies_when_it_has_said_where_it_is])
def test_a_second_worker_that_dies_is_not_waited_for(replica, monkeypatch, dies):
    monkeypatch.setattr(module, "_view", module._view)  # and so put back
    monkeypatch.setattr(module, "_train", dies(module._train))
    assert profile_pair(replica, torch.ones(2, 8), budget_s=0.0) is None


def test_a_second_worker_that_fails_is_not_waited_for(replica):
    """In its lane, in the middle of training."""
    here, seen = os.getpid(), []

    def loss(model, x):
        seen.append(1)
        if os.getpid() != here and len(seen) > 3:
            raise ValueError("no")
        return model(x).square().mean()

    replica._loss = loss
    found = profile_pair(replica, torch.ones(2, 8), budget_s=60.0)
    assert found is None or found.lane_cpu_s > 0


@pytest.mark.parametrize(("tries", "value"), [([3.0], 3.0), ([5.0, 1.0, 9.0], 1.0), ([4.0, 3.0, 2.0, 1.0], 2.0)])
def test_what_is_typical(tries, value):
    assert lower_quartile(tries) == value


@pytest.mark.parametrize(
    ("step_s", "steps"), [(0.001, module.MAX_STEPS), (0.02, 25), (0.2, module.MIN_STEPS), (3.0, 3)]
)
def test_how_many_steps_are_tried(step_s, steps):
    done = 0
    while module._needs_more_steps(done, done * step_s, 0.5):
        done += 1
    assert done == steps
