"""Real replicas over the exchange: the same weights, moments and running statistics as one worker has."""

import hashlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.collectives.group import ViewGroup
from shoal.collectives.outcome import Committed
from shoal.data.batch import Batch
from shoal.lanes.reduction_tree import TreeSum
from shoal.lanes.replica import Clipping, Replica, add
from shoal.spec.view import View
from shoal.strategies.ordered_sync import OrderedAllReduceSync
from shoal.strategies.replicated import ReplicatedStrategy
from tests.collectives.worker_processes import WorkerProcesses

LANES, STEPS = 5, 6


def model():
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(8 * 36, 4)
    )
    return made.to(memory_format=torch.channels_last)


def mean(module, batch):
    return F.cross_entropy(module(*batch.inputs), batch.target)


def sum_with_count(module, batch):
    weights = batch.target.double() + 1
    losses = F.cross_entropy(module(*batch.inputs), batch.target, reduction="none")
    return (losses * weights.float()).sum(), weights.sum()


def lane_batch(step, lane):
    """Sizes differ; in some steps the last lane has no samples."""
    size = [3, 3, 2, 3, step % 2][lane]
    if size == 0:
        return None
    generator = torch.Generator().manual_seed(100 * step + lane)
    inputs = torch.randn(size, 3, 8, 8, generator=generator).to(memory_format=torch.channels_last)
    return Batch((inputs,), torch.randint(0, 4, (size,), generator=generator), size)


def train(sync, lanes, loss):
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    replica = Replica(module, optimizer, loss, seed=1, clipping=Clipping(norm=0.5))
    replica.probe(lane_batch(0, 0))
    losses = []
    for step in range(STEPS):
        batches = {lane: lane_batch(step, lane) for lane in range(LANES)}
        total = sum(batch.size for batch in batches.values() if batch)
        sums = TreeSum(LANES, add)
        replica.begin_step()
        for lane in lanes:
            batch = batches[lane]
            share = batch.size / total if batch else 0
            sums.push_lane(lane, batch and replica.forward_backward(step, lane, batch, share=share))
        outcome = sync.commit(replica, step, sums)
        assert isinstance(outcome, Committed), outcome
        losses.append(outcome.loss.item())
    return losses, fingerprint(replica)


def fingerprint(replica):
    digest = hashlib.sha256()
    for tensor in replica.model.state_dict().values():
        digest.update(tensor.contiguous().numpy().tobytes())
    for moments in replica.optimizer.state_dict()["state"].values():
        for tensor in moments.values():
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("loss", [mean, sum_with_count])
@pytest.mark.parametrize("remote_seats", [(), (0,), (0, 1, 2)], ids=["one host", "mixed", "all apart"])
def test_three_workers_train_what_one_does(loss, remote_seats):
    def act(me):
        assert me.join() == ""
        return train(me.sync, me.carries[me.seat], loss)

    single = OrderedAllReduceSync(LANES, ViewGroup())
    assert single.reconfigure(View(number=1, carries={0: list(range(LANES))}), 0) is None
    expected = train(single, range(LANES), loss)
    with WorkerProcesses({0: [0], 1: [1, 2], 2: [3, 4]}, LANES, remote_seats=remote_seats) as workers:
        assert set(map(str, workers.run(act).values())) == {str(expected)}


def test_batches_are_copied_to_the_device_of_the_replica():
    """The meta device stands for a GPU: a batch that stayed on the CPU would be seen."""
    seen = []

    def forward_backward(step, lane, batch, *, share, sink):
        seen.append((step, lane, batch.inputs[0].device.type, batch.target.device.type))

    replica = SimpleNamespace(device=torch.device("meta"), forward_backward=forward_backward)
    context = SimpleNamespace(progress=SimpleNamespace(step=3), peers=SimpleNamespace())
    strategy = ReplicatedStrategy(context, replica, group=ViewGroup(), sync=SimpleNamespace(exact=True))
    strategy._forward_backward(2, lane_batch(0, 0), 1.0, None)
    assert seen == [(3, 2, "meta", "meta")]
