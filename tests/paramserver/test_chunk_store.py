"""Servers that hold chunks compute what one replica computes, to the bit, however the chunks are cut and moved."""

import functools
import random

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import optim

from shoal.checkpoint.sha256 import state_sha256
from shoal.collectives.transport.shared_memory import SharedMemory
from shoal.lanes.elementwise import why_not_sliceable
from shoal.lanes.replica import Clipping
from shoal.paramserver.chunk_state import chunk_state_from_replica, group_hyperparameters, param_group_indices
from shoal.paramserver.chunk_store import ChunkStore
from tests.paramserver.chunked_model import (
    LANES,
    ShardedChunkStores,
    lane_sum_of,
    random_gradients,
    replica_of,
    train_both,
)

OPTIMIZERS = {
    "sgd": functools.partial(optim.SGD, lr=0.1, weight_decay=0.01),
    "momentum": functools.partial(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": functools.partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": functools.partial(optim.Adam, lr=0.01),
    "adamw": functools.partial(optim.AdamW, lr=0.01, amsgrad=True),
    "adagrad": functools.partial(optim.Adagrad, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "rmsprop": functools.partial(optim.RMSprop, lr=0.01, centered=True, momentum=0.5),
    "nadam": functools.partial(optim.NAdam, lr=0.01),
    "radam": functools.partial(optim.RAdam, lr=0.01),
}
FUSED = ("sgd", "momentum", "nesterov", "adam", "adamw", "adagrad")
KINDS = [
    (name, kind) for name in OPTIMIZERS for kind in ("loop", "foreach", "fused") if kind != "fused" or name in FUSED
]
ROUNDS_AT_ENDS = [("momentum", "fused"), ("nesterov", "fused")]  # with 16 bits; `why_not_sliceable` knows
CLIPPINGS = [Clipping(), Clipping(norm=0.5), Clipping(norm=1e6), Clipping(value=0.3)]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def kind_of(name, kind):
    return OPTIMIZERS[name] if kind == "loop" else functools.partial(OPTIMIZERS[name], **{kind: True})


@pytest.mark.parametrize(("name", "kind"), KINDS)
@settings(max_examples=2, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(seed=st.integers(0, 10**6), clipping=st.sampled_from(CLIPPINGS), counted=st.booleans())
def test_servers_train_what_a_replica_does(name, kind, seed, clipping, counted):
    mixed = (name, kind) not in ROUNDS_AT_ENDS
    alone, together = train_both(kind_of(name, kind), seed=seed, clipping=clipping, counted=counted, mixed=mixed)
    assert state_sha256(together.state()) == state_sha256(alone.state())


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("counted", [False, True])
def test_of_every_dtype(clipping, dtype, counted):
    alone, together = train_both(
        OPTIMIZERS["momentum"], seed=3, clipping=clipping, counted=counted, dtype=dtype, mixed=False
    )
    assert state_sha256(together.state()) == state_sha256(alone.state())


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_elementwise_optimizers_are_known_beforehand(name, kind):
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        optimizer = kind_of(name, kind)([torch.nn.Parameter(torch.zeros(1))])
        why = why_not_sliceable(type(optimizer), group_hyperparameters(optimizer), [dtype])
        assert bool(why) == ((name, kind) in ROUNDS_AT_ENDS and dtype.itemsize == 2), why


def test_optimizers_that_look_at_whole_tensors_are_found_out():
    for kind in (optim.Adafactor, optim.Muon, optim.LBFGS, optim.SparseAdam):
        optimizer = kind([torch.nn.Parameter(torch.zeros(2, 2))])
        assert kind.__name__ in why_not_sliceable(kind, group_hyperparameters(optimizer), [torch.float32])


class GradientMutatingOptimizer(optim.Optimizer):
    """Writes into gradients, and counts in plain numbers."""

    def __init__(self, params, lr, weight_decay=0.1):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    p.grad.add_(p, alpha=group["weight_decay"])
                    p.add_(p.grad, alpha=-group["lr"] / state["step"])


def test_an_optimizer_of_the_users_own():
    alone, together = train_both(functools.partial(GradientMutatingOptimizer, lr=0.1), seed=5)
    assert state_sha256(together.state()) == state_sha256(alone.state())


def shard_of(replica, **options):
    groups, hyper = param_group_indices(replica), group_hyperparameters(replica.optimizer)
    kind = type(replica.optimizer)
    return ChunkStore(replica.layout, optimizer=kind, groups=groups, hyper=hyper, lanes=LANES, **options)


@pytest.fixture
def adam():
    return replica_of(OPTIMIZERS["adam"])


@pytest.fixture
def held(adam):
    shard = shard_of(adam)
    shard.write_state(
        0, shard.chunk_count, chunk_state_from_replica(adam, adam.layout, 0, shard.chunk_count, lanes=LANES)
    )
    return shard


def test_parts_that_are_an_update_ahead_are_kept_apart_until_the_rest_has_it_too(adam, held):
    hyper, stretch = group_hyperparameters(adam.optimizer), random_gradients(adam.layout, 0)
    everything = held.chunk_count - 1
    held.apply(3, 9, hyper=hyper, source=stretch)
    ahead = held.read_state(3, 9)
    held.set_pieces([(0, everything)])
    assert state_sha256(held.read_state(3, 9)) == state_sha256(ahead)
    held.apply(0, 3, hyper=hyper, source=stretch)
    held.apply(9, everything, hyper=hyper, source=stretch)
    whole = shard_of(adam)
    whole.write_state(
        0, whole.chunk_count, chunk_state_from_replica(adam, adam.layout, 0, whole.chunk_count, lanes=LANES)
    )
    whole.apply(0, everything, hyper=hyper, source=stretch)
    held.set_pieces([(0, everything)])
    assert state_sha256(held.read_state(0, everything)) == state_sha256(whole.read_state(0, everything))
    assert len(held.read_state(0, everything)["runs"]) == len(adam.layout.tensor_ranges(0, adam.layout.tail))


@pytest.mark.parametrize("kind", ["loop", "foreach", "fused"])
def test_the_first_update_of_some_is_the_second_of_others(kind):
    """As when lanes push for themselves."""
    replica = replica_of(kind_of("momentum", kind))
    shards = [shard_of(replica), shard_of(replica)]
    everything = shards[0].chunk_count - 1
    hyper = group_hyperparameters(replica.optimizer)
    first, second = (random_gradients(replica.layout, step) for step in range(2))
    for shard in shards:
        shard.write_state(
            0, shard.chunk_count, chunk_state_from_replica(replica, replica.layout, 0, shard.chunk_count, lanes=LANES)
        )
        shard.apply(0, 5, hyper=hyper, source=first)
    shards[0].apply(0, everything, hyper=hyper, source=second)
    for a, b in ((0, 5), (5, everything)):
        shards[1].apply(a, b, hyper=hyper, source=second)
    taken = [state_sha256([shard.read_state(a, b) for a, b in ((0, 5), (5, everything))]) for shard in shards]
    assert taken[0] == taken[1]


def test_the_tail_is_kept_as_it_came(adam, held):
    stretch, tail = random_gradients(adam.layout, 7), held.chunk_count - 1
    held.apply(tail, tail + 1, hyper=group_hyperparameters(adam.optimizer), source=stretch, count=2.0, coefficient=0.5)
    assert torch.equal(held.read_state(tail, tail + 1)["parameters"], stretch[adam.layout.tail :])
    assert held.norms(tail, tail + 1) == []


def test_sums_can_be_scaled_where_they_lie(adam, held):
    """And are what `apply` would have made of them."""
    other, stretch, hyper = shard_of(adam), random_gradients(adam.layout, 1), group_hyperparameters(adam.optimizer)
    other.write_state(0, other.chunk_count, held.read_state(0, held.chunk_count))
    for shard in (held, other):
        shard.sums.tensor.copy_(stretch)
    held.scale(0, held.chunk_count, count=3.3, coefficient=0.7)
    held.apply(0, held.chunk_count, hyper=hyper)
    other.apply(0, other.chunk_count, hyper=hyper, count=3.3, coefficient=0.7)
    assert state_sha256(held.read_state(0, held.chunk_count)) == state_sha256(other.read_state(0, other.chunk_count))
    assert torch.equal(held.sums.tensor[adam.layout.tail :], stretch[adam.layout.tail :])


def test_options_that_are_not_named_are_those_of_the_beginning(adam, held):
    other, stretch = shard_of(adam), random_gradients(adam.layout, 1)
    other.write_state(0, other.chunk_count, held.read_state(0, held.chunk_count))
    held.apply(0, held.chunk_count, hyper=[{"lr": 0.5}, {"lr": 0.25}], source=stretch)
    full = [
        {**options, "lr": lr} for options, lr in zip(group_hyperparameters(adam.optimizer), (0.5, 0.25), strict=True)
    ]
    other.apply(0, other.chunk_count, hyper=full, source=stretch)
    assert state_sha256(held.read_state(0, held.chunk_count)) == state_sha256(other.read_state(0, other.chunk_count))


def test_parameters_may_lie_in_shared_memory(adam):
    arena = SharedMemory(adam.layout.size_bytes)
    shard = shard_of(adam, parameters=arena.buffer)
    shard.write_state(
        0, shard.chunk_count, chunk_state_from_replica(adam, adam.layout, 0, shard.chunk_count, lanes=LANES)
    )
    stretch = random_gradients(adam.layout, 1)
    shard.apply(0, shard.chunk_count, hyper=group_hyperparameters(adam.optimizer), source=stretch)
    adam.apply(0, lane_sum_of(adam.layout, stretch, counted=False))
    there = adam.layout.views(arena.buffer.tensor).grads
    assert all(torch.equal(mine, p) for mine, p in zip(there, adam.trainable, strict=True))
    arena.close()


def test_stamps_travel_with_the_chunks(adam, held):
    held.applied[4:6], held.term[4:6], held.seq[4:6], held.clocks[4:6] = 7, 3, 11, torch.tensor([5, 6, 7])
    other = shard_of(adam)
    other.write_state(4, 6, held.read_state(4, 6))
    assert (other.applied[4:6].tolist(), other.term[4:6].tolist(), other.seq[4:6].tolist()) == (
        [7, 7],
        [3, 3],
        [11, 11],
    )
    assert other.clocks[4:6].tolist() == [[5, 6, 7]] * 2
    other.drop(4, 5)
    assert other.term[4:6].tolist() == [0, 3]


def test_what_is_not_held_cannot_be_used(adam, held):
    held.drop(3, 5)
    hyper = group_hyperparameters(adam.optimizer)
    with pytest.raises(ValueError, match="not all held"):
        held.apply(0, 4, hyper=hyper)
    with pytest.raises(ValueError, match="not all held"):
        held.read_state(4, 6)
    held.apply(5, 8, hyper=hyper, source=random_gradients(adam.layout, 0))
    for first, last in ((-1, 2), (2, 2), (0, held.chunk_count + 1)):
        with pytest.raises(ValueError, match="chunks"):
            held.read_state(first, last)


def _shorter(state):
    state["parameters"] = state["parameters"][:-64]


def _no_clocks(state):
    del state["clocks"]


def _other_lanes(state):
    state["clocks"] = state["clocks"][:, :-1]


def _run_missing(state):
    state["runs"].pop()


def _run_twice(state):
    state["runs"].append(state["runs"][-1])


def _slot_too_long(state):
    state["runs"][0]["state"]["exp_avg"] = torch.zeros(10_000)


def _no_tensor(state):
    state["applied"] = [0]


def _half_an_element(state):
    state["runs"][0]["start"] += 1


def _tensor_not_there(state):
    state["runs"][0]["place"] = 99


def _text(state):
    state["runs"] = "nonsense"


INVALID_STATES = [
    v for k, v in list(globals().items()) if k.startswith("_") and getattr(v, "__module__", "") == __name__
]


@pytest.mark.parametrize("spoil", INVALID_STATES)
def test_a_state_that_does_not_fit_changes_nothing(adam, held, spoil):
    before, state = state_sha256(held.read_state(0, held.chunk_count)), held.read_state(2, 6)
    state["parameters"].zero_()
    spoil(state)
    with pytest.raises(ValueError, match=r"."):
        held.write_state(2, 6, state)
    assert state_sha256(held.read_state(0, held.chunk_count)) == before
    with pytest.raises(ValueError, match="chunks"):
        held.write_state(2, 6, "nonsense")


def test_two_servers_hold_nothing_of_each_other(adam):
    """States are copies: neither giver nor taker sees what becomes of the other."""
    servers = ShardedChunkStores(adam, adam.layout, random.Random(1))
    shard, first, last = servers.pieces[0]
    state = shard.read_state(first, last)
    before = state_sha256(state)
    other = shard_of(adam)
    other.write_state(first, last, state)
    for it in (shard, other):
        it.apply(first, last, hyper=group_hyperparameters(adam.optimizer), source=random_gradients(adam.layout, 3))
    assert state_sha256(state) == before
    assert state_sha256(shard.read_state(first, last)) == state_sha256(other.read_state(first, last)) != before
