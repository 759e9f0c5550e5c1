"""Real processes that hold a model together: forked, each with a mesh of its own; what each returns comes back."""

import contextlib
import os
import pickle
import signal
import tempfile
import traceback
from pathlib import Path

import numpy as np
import torch
from benchmarks.overhead.models import GPT
from torch import nn
from torch.distributed import FileStore
from torch.nn import functional

from shoal.data.batch import Batch
from shoal.lanes.replica import Clipping, Replica, add
from shoal.lanes.rng import LaneRng
from shoal.sharding.build_model import build_sharded_model
from shoal.sharding.device_mesh import ShardMesh
from shoal.sharding.replica import ShardedReplica
from shoal.spec import seeds
from shoal.spec.sharding import FsdpConfig, PipelineParallelConfig, TensorParallelConfig

SEED = 3
LANES = 4
TIMEOUT_S = 120


def run_ranks(world_size, act, replica_size=None):
    """What `act(mesh)` returned in each of `world_size` processes, by rank."""
    with tempfile.TemporaryDirectory() as place:
        started = [_fork(rank, world_size, replica_size or world_size, Path(place), act) for rank in range(world_size)]
        try:
            return _results([pipe for _, pipe in started])
        finally:
            for pid, pipe in started:
                pipe.close()
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _fork(rank, world_size, replica_size, place, act):
    out, into = os.pipe()
    pid = os.fork()
    if pid:
        os.close(into)
        return pid, os.fdopen(out, "rb")
    signal.alarm(TIMEOUT_S)
    os.close(out)
    with os.fdopen(into, "wb") as pipe:
        try:
            torch.set_num_threads(1)
            mesh = ShardMesh(
                FileStore(str(place / "store"), world_size), rank=rank, world_size=world_size, replica_size=replica_size
            )
            pipe.write(pickle.dumps((True, act(mesh))))
        except BaseException:
            pipe.write(pickle.dumps((False, traceback.format_exc())))
    os._exit(0)


def _results(pipes):
    """One failure makes others: the first that is not about a lost peer is the one to tell."""
    contents = [pipe.read() for pipe in pipes]
    assert all(contents), f"died: {[rank for rank, content in enumerate(contents) if not content]}"
    outcomes = [pickle.loads(content) for content in contents]
    failures = [value for well, value in outcomes if not well]
    assert not failures, min(failures, key=lambda text: "gloo" in text)
    return [value for _, value in outcomes]


# ---- what is trained ----


def gpt():
    return GPT(vocabulary=34, context=12, width=32, heads=4, depth=3)


class TiedGPT(GPT):
    def __init__(self):
        super().__init__(vocabulary=34, context=12, width=32, heads=4, depth=2)
        self.head.weight = self.tokens.weight


def mlp():
    return nn.Sequential(
        nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 24), nn.GELU(), nn.Linear(24, 34)
    )


def partly_frozen():
    model = mlp()
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    model[4].bias.requires_grad_(False)
    return model


def batch_normed():
    """Buffers that move, one that does not, and dropout."""
    model = nn.Sequential(
        nn.Linear(12, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(32, 32),
        nn.ReLU(),
        nn.Linear(32, 34),
    )
    model.register_buffer("constant", torch.tensor([1.0, 2.5]))
    return model


class Encoder(nn.Module):
    """torch's own layers, with attention, dropout and a mask."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(34, 32)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True) for _ in range(3))
        self.head = nn.Linear(32, 34)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(12))

    def forward(self, x):
        h = self.tokens(x)
        for layer in self.layers:
            h = layer(h, src_mask=self.mask, is_causal=True)
            h += 1
        return self.head(h).transpose(1, 2)


class NumpyInitialised(nn.Module):
    """Some of its first values come from numpy: of a matrix, of what no pattern cuts, and of a buffer."""

    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(0)
        table = torch.from_numpy(rng.standard_normal((34, 32), dtype=np.float32))
        self.tokens = nn.Embedding.from_pretrained(table, freeze=False)
        self.gain = nn.Parameter(torch.from_numpy(rng.standard_normal(32, dtype=np.float32)))
        self.feed = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 34)
        self.register_buffer("shift", torch.from_numpy(rng.standard_normal(32, dtype=np.float32)))

    def forward(self, x):
        return self.head(self.feed(self.tokens(x) * self.gain + self.shift)).transpose(1, 2)


class SharedParameters(nn.Module):
    """A parameter without dimensions, and large ones that other code uses than their own modules'."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(2048, 32), nn.Embedding(2048, 32)
        self.more = nn.ParameterList([nn.Parameter(torch.randn(2048, 32))])
        self.blocks = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        h = self.tokens(x) + self.places.weight[: x.shape[1]] + self.more[0][: x.shape[1]]
        return (self.blocks(h) @ self.tokens.weight.T[:, :34] * self.scale).transpose(1, 2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, h, table, mask):
        wide = torch.zeros(h.shape, device=mask.device)
        return h + wide + torch.relu(self.layer(h + table)) * mask


class MaskedBlocks(nn.Module):
    """What is made once and handed to every block: a mask of the input, and a table that is trained."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(34, 32), nn.Embedding(12, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(32, 34)

    def forward(self, x):
        h, table, mask = self.tokens(x), self.places(torch.arange(x.shape[1])), (x > 4).unsqueeze(-1)
        for block in self.blocks:
            h = block(h, table, mask=mask)
        return self.head(h).transpose(1, 2)


MODELS = {
    "gpt": gpt,
    "tied": TiedGPT,
    "mlp": mlp,
    "frozen": partly_frozen,
    "batch_normed": batch_normed,
    "encoder": Encoder,
}
MODELS |= {"given": NumpyInitialised, "loose": SharedParameters, "masked": MaskedBlocks}
TOKEN_MODELS = {"gpt", "tied", "encoder", "given", "loose", "masked"}
SPLIT_POINTS = {
    "gpt": ["blocks.1", "blocks.2", "norm"],
    "tied": ["blocks.1", "norm", "head"],
    "mlp": ["2", "4", "6"],
    "frozen": ["2", "4", "6"],
    "batch_normed": ["4", "5", "6"],
    "encoder": ["layers.1", "layers.2", "head"],
    "given": ["feed.0", "feed.2", "head"],
    "masked": ["blocks.1", "blocks.3", "head"],
}


def batch(model, step, lane, size=6):
    generator = torch.Generator().manual_seed(1000 * step + lane)
    if model in TOKEN_MODELS:
        tokens = torch.randint(0, 34, (size, 13), generator=generator)
        return Batch((tokens[:, :-1],), tokens[:, 1:], size)
    return Batch(
        (torch.randn(size, 12, generator=generator),), torch.randint(0, 34, (size,), generator=generator), size
    )


def loss(model, batch):
    return functional.cross_entropy(model(*batch.inputs), batch.target)


def weighted_loss(model, batch):
    return functional.cross_entropy(model(*batch.inputs), batch.target, reduction="sum"), batch.target.numel()


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.003, fused=True)


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


# ---- training ----


def shard_config(kind, name, ways, **options):
    if kind == "fsdp":
        return FsdpConfig(kind=kind)
    if kind == "tensor":
        return TensorParallelConfig(kind=kind, **options)
    return PipelineParallelConfig(kind=kind, **({"cuts": SPLIT_POINTS[name][: ways - 1]} | options))


def seed_model():
    LaneRng(torch.device("cpu")).seed_all(SEED, seeds.MODEL)


def sharded(mesh, kind, name, optimizer=sgd, loss=loss, clip=None, **options):
    seed_model()
    spec = shard_config(kind, name, mesh.replica_size, **options)
    sharded_model, local_state = build_sharded_model(spec, mesh, MODELS[name], loss=loss, example=batch(name, 0, 0))
    replica = ShardedReplica(
        sharded_model, local_state, optimizer(local_state.param_module), loss, seed=SEED, clipping=Clipping(norm=clip)
    )
    replica.probe(batch(name, 0, 0))
    return replica


def train(replica, name, steps, first=0):
    """Every lane once in a step, by whichever replica and member; all share equally."""
    mesh = replica.sharded_model.mesh
    block = LANES // mesh.replicas
    lanes = range(mesh.replica_rank * block, (mesh.replica_rank + 1) * block)
    mine = lanes if replica.sharded_model.shares_lane else lanes[mesh.shard_rank :: mesh.replica_size]
    losses = []
    for step in range(first, first + steps):
        replica.begin_step()
        sums = [replica.forward_backward(step, lane, batch(name, step, lane), share=1 / LANES) for lane in mine]
        total = tree_sum(sums)
        replica.reduce_across_replicas(total)
        losses.append(float(replica.apply(step, total)))
    return losses


def tree_sum(sums):
    """Added in pairs, as lanes always are."""
    return sums[0] if len(sums) == 1 else add(tree_sum(sums[: len(sums) // 2]), tree_sum(sums[len(sums) // 2 :]))


def single_process(name, steps, optimizer=sgd, loss=loss, clip=None):
    """The same in a single process: the replica, and the losses."""
    seed_model()
    model = MODELS[name]()
    replica = Replica(model, optimizer(model), loss, seed=SEED, clipping=Clipping(norm=clip))
    replica.probe(batch(name, 0, 0))
    losses = []
    for step in range(steps):
        replica.begin_step()
        lanes = range(LANES)
        sums = [replica.forward_backward(step, lane, batch(name, step, lane), share=1 / LANES) for lane in lanes]
        losses.append(float(replica.apply(step, tree_sum(sums))))
    return replica, losses
