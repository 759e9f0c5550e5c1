"""Between a replica and chunks: nothing is lost on the way, and what does not fit is refused."""

import copy
import functools
from itertools import pairwise

import pytest
import torch
from torch import nn, optim

from shoal.checkpoint.sha256 import state_sha256
from shoal.checkpoint.state_format import pack_state, unpack_state
from shoal.lanes.replica import Replica
from shoal.paramserver.chunk_state import (
    chunk_state_from_replica,
    group_hyperparameters,
    load_chunk_states,
    param_group_indices,
)
from tests.paramserver.chunked_model import lane_sum_of, random_gradients, replica_of

ADAMW = functools.partial(optim.AdamW, lr=0.01)


def trained(make=ADAMW, steps=3):
    replica = replica_of(make)
    for step in range(steps):
        replica.apply(step, lane_sum_of(replica.layout, random_gradients(replica.layout, step), counted=False))
    return replica, replica.layout


def contents(replica, layout, borders):
    return [
        (a, b, unpack_state(pack_state(chunk_state_from_replica(replica, layout, a, b)))) for a, b in pairwise(borders)
    ]


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("make", [optim.AdamW, optim.NAdam, optim.Adagrad, functools.partial(optim.SGD, momentum=0.9)])
def test_scattered_and_collected_it_is_the_same(make, steps):
    replica, layout = trained(functools.partial(make, lr=0.01), steps)
    other = trained(functools.partial(make, lr=0.01), 0 if steps else 2)[0]
    chunks = len(layout.chunk_offsets) - 1
    assert state_sha256(other.state()) != state_sha256(replica.state())
    load_chunk_states(other, layout, contents(replica, layout, [0, 1, 5, chunks - 1, chunks])[::-1])
    assert state_sha256(other.state()) == state_sha256(replica.state())


def test_a_collected_replica_goes_on_as_if_nothing_had_been():
    replica, layout = trained()
    other = copy.deepcopy(replica)
    load_chunk_states(other, layout, contents(replica, layout, [0, 7, len(layout.chunk_offsets) - 1]))
    for it in (replica, other):
        it.apply(3, lane_sum_of(layout, random_gradients(layout, 3), counted=False))
    assert state_sha256(other.state()) == state_sha256(replica.state())
    assert [p.stride() for p in other.trainable] == [p.stride() for p in replica.trainable]


def test_a_parameter_with_gaps():
    model = nn.Module()
    model.gaps = nn.Parameter(torch.randn(40, 30)[:, ::2])
    replica = Replica(model, optim.Adam(model.parameters()), lambda m, b: m.gaps.sum(), seed=0)
    replica.apply(0, replica.forward_backward(0, 0, None, share=1))
    other = copy.deepcopy(replica)
    with torch.no_grad():
        other.model.gaps.zero_()
    load_chunk_states(other, replica.layout, contents(replica, replica.layout, [0, 1, 2]))
    assert state_sha256(other.state()) == state_sha256(replica.state())


def test_stamps_of_a_start():
    replica, layout = trained(steps=0)
    state = chunk_state_from_replica(replica, layout, 2, 4, step=9, lanes=2)
    assert (state["applied"].tolist(), state["clocks"].tolist()) == ([9, 9], [[9, 9], [9, 9]])
    assert (state["term"].tolist(), state["seq"].tolist()) == ([0, 0], [0, 0])


def test_groups_and_options():
    replica, _ = trained(steps=0)
    names = [name for name, _ in replica.model.named_parameters()]
    groups = dict(zip(names, param_group_indices(replica), strict=True))
    assert (groups["big"], groups["conv.bias"], groups["left_alone"]) == (0, 1, -1)
    assert [options["lr"] for options in group_hyperparameters(replica.optimizer)] == [0.01, 0.003]
    assert all("params" not in options for options in group_hyperparameters(replica.optimizer))


def test_all_chunks_are_needed_and_each_once():
    replica, layout = trained(steps=0)
    chunks = len(layout.chunk_offsets) - 1
    whole = contents(replica, layout, [0, 3, chunks])
    for some in (whole[:1], whole[1:], [], [whole[0], *whole]):
        with pytest.raises(ValueError, match="not all chunks"):
            load_chunk_states(replica, layout, some)


def test_a_state_that_is_not_one_number_per_element_is_refused():
    model = nn.Linear(300, 20)
    optimizer = optim.Adafactor(model.parameters())
    replica = Replica(model, optimizer, lambda m, b: m.weight.sum() + m.bias.sum(), seed=0)
    replica.apply(0, replica.forward_backward(0, 0, None, share=1))
    with pytest.raises(ValueError, match="cannot be split"):
        chunk_state_from_replica(replica, replica.layout, 0, len(replica.layout.chunk_offsets) - 1)
