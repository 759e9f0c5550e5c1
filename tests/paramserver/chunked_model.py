"""A model with everything that is odd, cut into small chunks, and two servers' worth of shards that hold it."""

import contextlib
import copy
import random
from unittest.mock import patch

import torch
from torch import nn

from shoal.checkpoint.state_format import pack_state, unpack_state
from shoal.lanes.clipping import Clipping, clip_coefficient
from shoal.lanes.lane_sum import LaneSum
from shoal.lanes.replica import Replica
from shoal.paramserver.chunk_state import (
    chunk_state_from_replica,
    group_hyperparameters,
    load_chunk_states,
    param_group_indices,
)
from shoal.paramserver.chunk_store import ChunkStore
from shoal.spec import chunk_table

LANES = 3


@contextlib.contextmanager
def small_chunks():
    with patch.object(chunk_table, "MIN_CHUNK_BYTES", 512):
        yield


class MixedDtypeModel(nn.Module):
    def __init__(self, dtype, *, mixed):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 17, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(5)
        self.big = nn.Parameter(torch.randn(61, 83))
        self.turned = nn.Parameter(torch.randn(37, 41).t())
        self.rounded = nn.Parameter(torch.randn(3001).to(torch.bfloat16 if mixed else dtype))
        self.single = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.left_alone = nn.Parameter(torch.randn(7))
        if not mixed:
            self.to(dtype)


def two_groups(model, make):
    """Biases and the like in a group of their own; two parameters in none."""
    there = [p for n, p in model.named_parameters() if n not in ("left_alone", "empty")]
    return make(
        [
            {"params": [p for p in there if p.dim() > 1]},
            {"params": [p for p in there if p.dim() < 2], "lr": 0.003, "weight_decay": 0.0},
        ]
    )


def replica_of(make, *, clipping=None, dtype=torch.float32, mixed=True):
    model = MixedDtypeModel(dtype, mixed=mixed)
    made = Replica(model, two_groups(model, make), lambda m, b: m.norm(b).sum(), seed=1, clipping=clipping)
    made.probe(torch.randn(4, 5, dtype=dtype))
    with small_chunks():
        assert len(made.layout.chunk_offsets) > 10
    assert len(made.moving_buffers.names) == 3
    return made


def lane_sum_of(layout, flat_buffer, *, counted):
    """The sum that lies in a stretch, in memory of its own."""
    it = layout.views(flat_buffer.clone())
    copies = [[t.clone() for t in tensors] for tensors in (it.grads, it.float_buffers, it.int_buffers)]
    return LaneSum(*copies, it.loss.clone(), it.count.clone() if counted else None)


def random_gradients(layout, step):
    stretch = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    it, generator = layout.views(stretch), torch.Generator().manual_seed(step)
    for tensor in (*it.grads, *it.float_buffers):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    for tensor in it.int_buffers:
        tensor.fill_(step)
    it.loss.fill_(step)
    it.count.fill_(37.3)
    return stretch


class ShardedChunkStores:
    """Two shards; each chunk lies on one of them. Pieces are cut at random."""

    def __init__(self, replica, layout, chance):
        self.layout, self.rng = layout, chance
        options = {
            "groups": param_group_indices(replica),
            "hyper": group_hyperparameters(replica.optimizer),
            "lanes": LANES,
        }
        self.shards = [ChunkStore(layout, optimizer=type(replica.optimizer), **options) for _ in range(2)]
        self.owners = [chance.randrange(2) for _ in range(self.shards[0].chunk_count)]
        self.repartition()
        for shard, first, last in self.pieces:
            shard.write_state(
                first,
                last,
                unpack_state(pack_state(chunk_state_from_replica(replica, layout, first, last, lanes=LANES))),
            )

    def repartition(self):
        chunks, self.pieces, first = len(self.owners), [], 0
        while first < chunks:
            last = min(first + self.rng.choice([1, 2, 3, 7, 20]), chunks - (first < chunks - 1))
            last = next((i for i in range(first, last) if self.owners[i] != self.owners[first]), last)
            self.pieces.append((self.shards[self.owners[first]], first, last))
            first = last
        for shard in self.shards:
            shard.set_pieces([(a, b) for it, a, b in self.pieces if it is shard and shard.term[a]])

    def move_chunks(self):
        """Some chunks go to the other server."""
        shard, first, last = self.rng.choice(self.pieces)
        first = self.rng.randrange(first, last)
        other = next(it for it in self.shards if it is not shard)
        other.write_state(first, last, unpack_state(pack_state(shard.read_state(first, last))))
        shard.drop(first, last)
        self.owners[first:last] = [self.shards.index(other)] * (last - first)
        self.repartition()

    def apply(self, flat_buffer, *, clipping, count, hyper):
        for shard in self.shards:
            shard.sums.tensor.copy_(flat_buffer)
        by = None
        if clipping.norm is not None:
            norms = [norm for shard, first, last in self.pieces for norm in shard.norms(first, last)]
            by = clip_coefficient(norms, clip=clipping.norm, count=count, dtype=self.layout.norm_dtype).item()
        self.rng.shuffle(order := list(self.pieces))
        for shard, first, last in order:
            middle = self.rng.randint(first, last)  # now and then only a part, and then the rest
            for a, b in ((first, middle), (middle, last)) if self.rng.random() < 0.1 else ((first, last),):
                if a < b:
                    shard.apply(a, b, hyper=hyper, count=count, coefficient=by, clip_value=clipping.value)
        assert all(torch.equal(shard.sums.tensor, flat_buffer) for shard in self.shards)

    def collect(self, replica):
        load_chunk_states(replica, self.layout, [(a, b, shard.read_state(a, b)) for shard, a, b in self.pieces])


def train_both(make, *, seed, clipping=None, counted=False, dtype=torch.float32, mixed=True, steps=6):
    """The same totals applied by a replica, and by servers: both replicas at the end."""
    clipping, chance, count = clipping or Clipping(), random.Random(seed), 37.3 if counted else None
    replica = replica_of(make, clipping=clipping, dtype=dtype, mixed=mixed)
    layout, other = replica.layout, copy.deepcopy(replica)
    servers = ShardedChunkStores(other, layout, chance)
    for step in range(steps):
        for group in replica.optimizer.param_groups:
            group["lr"] *= 0.9
        stretch = random_gradients(layout, 100 * seed + step)
        servers.apply(stretch, clipping=clipping, count=count, hyper=group_hyperparameters(replica.optimizer))
        replica.apply(step, lane_sum_of(layout, stretch, counted=counted))
        chance.choice([servers.move_chunks, servers.repartition, lambda: None])()
    servers.collect(other)
    for mine, theirs in zip(replica.optimizer.param_groups, other.optimizer.param_groups, strict=True):
        theirs["lr"] = mine["lr"]
    return replica, other
