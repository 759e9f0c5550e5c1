"""What is trained in the tests of servers: small models with all that is hard, and what one worker makes of them."""

import functools
from dataclasses import dataclass

import torch
from torch import nn

from shoal.checkpoint.sha256 import state_sha256
from shoal.collectives.group import ViewGroup
from shoal.collectives.outcome import Committed
from shoal.lanes.clipping import Clipping
from shoal.lanes.replica import Replica
from shoal.spec.view import View
from shoal.strategies.ordered_sync import OrderedAllReduceSync

LANES = 4


@dataclass(frozen=True)
class Workload:
    """A model with batch norm and a schedule. `weighted_loss`: the loss has a divisor of its own."""

    optimizer: str = "adamw"
    norm: float | None = None
    value: float | None = None
    weighted_loss: bool = False
    hidden: int = 200
    lanes: int = LANES

    @property
    def optimizer_class(self):
        return {"adamw": torch.optim.AdamW, "momentum": torch.optim.SGD, "sgd": torch.optim.SGD}[self.optimizer]

    def replica(self):
        model = nn.Sequential(
            nn.Linear(20, self.hidden), nn.BatchNorm1d(self.hidden), nn.ReLU(), nn.Linear(self.hidden, 5)
        )
        generator = torch.Generator().manual_seed(0)  # its own: other threads may draw from the process's generator
        for layer in (model[0], model[3]):
            for parameter in layer.parameters():
                nn.init.uniform_(parameter, -0.2, 0.2, generator=generator)
        options = {"adamw": {"lr": 1e-2}, "momentum": {"lr": 0.1, "momentum": 0.9}, "sgd": {"lr": 0.1}}[self.optimizer]
        optimizer = self.optimizer_class(model.parameters(), **options)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
        clipping = Clipping(norm=self.norm, value=self.value)
        made = Replica(model, optimizer, self._loss, seed=1, schedule=schedule, clipping=clipping)
        made.probe(self.batch(0, 0))
        return made

    def _loss(self, model, batch):
        x, y = batch
        if not self.weighted_loss:
            return nn.functional.cross_entropy(model(x), y)
        return nn.functional.cross_entropy(model(x), y, reduction="sum"), int(3 + y.sum())

    def size(self, step, lane):
        """Now and then a lane has fewer samples, or none."""
        return (8, 5, 0)[(step % 3 == 1) * (lane == 2) + 2 * (step % 4 == 2) * (lane == self.lanes - 1)]

    def total(self, step):
        return sum(self.size(step, lane) for lane in range(self.lanes))

    def batch(self, step, lane):
        size = self.size(step, lane)
        generator = torch.Generator().manual_seed(1000 * step + lane)
        x, y = torch.randn(size, 20, generator=generator), torch.randint(0, 5, (size,), generator=generator)
        return (x, y) if size else None


@dataclass(frozen=True)
class CounterWorkload:
    """Counters: lane and step say what is added to each key, in whole numbers, so that the order does not matter and
    each update counts once or is missed."""

    keys: int = 3000
    lanes: int = LANES

    optimizer_class = torch.optim.SGD

    def replica(self):
        model = nn.Module()
        model.counters = nn.Parameter(torch.zeros(self.keys, dtype=torch.float64))
        # a lane's step is as large as its share of the samples
        optimizer = torch.optim.SGD(model.parameters(), lr=float(self.lanes))
        return Replica(model, optimizer, lambda m, b: -(m.counters * b).sum(), seed=1)

    def size(self, step, lane):
        return 1

    def total(self, step):
        return self.lanes

    def batch(self, step, lane):
        generator = torch.Generator().manual_seed(1000 * step + lane)
        return torch.randint(1, 1000, (self.keys,), generator=generator).double()

    def sum(self, steps):
        """What the counters must show."""
        return sum(self.batch(step, lane) for step in range(steps) for lane in range(self.lanes))


def one_step(replica, sync, workload, step, lanes, *, halt=False):
    """As the training loop does it."""
    sums, total = sync.begin_step(), workload.total(step)
    replica.begin_step()
    for lane in [lane for lane in lanes if sync.needs_lane(step, lane)]:
        batch = workload.batch(step, lane)
        share = sync.lane_weight(lane, workload.size(step, lane), total)
        sums.push_lane(lane, None if batch is None else replica.forward_backward(step, lane, batch, share=share))
    outcome = sync.commit(replica, step, sums, halt=halt)
    if not isinstance(outcome, Committed):
        replica.undo_step()
    return outcome


class WithoutServers(OrderedAllReduceSync):
    """Takes every lane of every step, as `one_step` asks servers."""

    def needs_lane(self, step, lane):
        return True

    def lane_weight(self, lane, size, total):
        return size / total


@functools.cache
def single_worker(workload, steps):
    """State and losses of one worker that carries everything, without servers."""
    replica, sync = workload.replica(), WithoutServers(workload.lanes, ViewGroup())
    lanes = list(range(workload.lanes))
    sync.reconfigure(View(number=1, carries={0: lanes}), 0)
    losses = [float(one_step(replica, sync, workload, step, lanes).loss) for step in range(steps)]
    return state_sha256(replica.state()), losses
