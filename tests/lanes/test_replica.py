"""The rules of exactness, seen from one replica."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.data.batch import Batch
from shoal.lanes.reduction_tree import TreeSum
from shoal.lanes.replica import Clipping, Replica, add


def cross_entropy(model, batch):
    return F.cross_entropy(model(*batch.inputs), batch.target)


def replica_of(model, loss=cross_entropy, lr=0.1, **settings):
    return Replica(model, torch.optim.SGD(model.parameters(), lr=lr), loss, seed=3, **settings)


def samples(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator)


def batches(x, y, lanes):
    """Dealt like the dealer does: sizes differ by at most one; None where nothing is left."""
    cut = [(len(x) * i) // lanes for i in range(lanes + 1)]
    return [Batch((x[a:b],), y[a:b], b - a) if b > a else None for a, b in itertools.pairwise(cut)]


def total(replica, dealt, step=0):
    sums = TreeSum(len(dealt), add)
    size = sum(b.size for b in dealt if b)
    replica.begin_step()
    for lane, batch in enumerate(dealt):
        value = None if batch is None else replica.forward_backward(step, lane, batch, share=batch.size / size)
        sums.push_lane(lane, value)
    return sums.total()


def test_lanes_give_the_gradient_of_the_mean_over_all_samples():
    for n, lanes in ((12, 4), (13, 4), (3, 4), (1, 4), (7, 3), (5, 1)):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        x, y = samples(n)
        F.cross_entropy(model(x), y).backward()
        expected = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        found = total(replica_of(model), batches(x, y, lanes))
        for a, b in zip(found.grads, expected, strict=True):
            torch.testing.assert_close(a, b)
        torch.testing.assert_close(found.loss.float(), F.cross_entropy(model(x), y).detach())


def test_a_divisor_of_ones_own_is_summed_over_lanes_before_it_divides():
    def loss(model, batch):
        weight = batch.target.double() + 1
        return (F.cross_entropy(model(*batch.inputs), batch.target, reduction="none") * weight).sum(), weight.sum()

    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    x, y = samples(11)
    replica = replica_of(model, loss, lr=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    summed, count = loss(model, Batch((x,), y, 11))
    (summed / count).backward()
    expected = [b - p.grad for b, p in zip(before, model.parameters(), strict=True)]
    model.zero_grad(set_to_none=True)
    value = replica.apply(0, total(replica, batches(x, y, 4)))
    for p, e in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.detach(), e)
    torch.testing.assert_close(value, (summed / count).detach())


def test_a_lanes_randomness_does_not_depend_on_the_other_lanes():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3))
    x, y = samples(8)
    dealt = batches(x, y, 4)
    replica = replica_of(model)

    def lane(number):
        replica.begin_step()
        return replica.forward_backward(5, number, dealt[number], share=0.25).grads

    alone = lane(2)
    for number in (0, 1, 2, 3, 3, 0):
        lane(number)
    assert all(torch.equal(a, b) for a, b in zip(alone, lane(2), strict=True))
    same = [replica.forward_backward(5, number, dealt[2], share=0.25).grads[0] for number in (1, 2)]
    assert not torch.equal(*same), "the same samples in another lane have other randomness"


def test_batch_norm_statistics_are_per_lane_and_merged_by_share():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))
    norm = model[0]
    x, y = samples(10)
    dealt = batches(x, y, 4)
    replica = replica_of(model)
    replica.probe(dealt[0])
    assert sorted(replica.moving_buffers.names) == ["0.num_batches_tracked", "0.running_mean", "0.running_var"]
    assert norm.num_batches_tracked == 0  # the probe put it back
    replica.apply(0, total(replica, dealt))
    means = torch.stack([0.1 * b.inputs[0].mean(0) * b.size / 10 for b in dealt])
    torch.testing.assert_close(norm.running_mean, means.sum(0))
    assert norm.num_batches_tracked == 1


def test_constant_buffers_are_left_alone():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)
            self.register_buffer("mask", torch.tensor([0.1, float("-inf"), 0.3]))

        def forward(self, x):
            return self.layer(x)

    model = Masked()
    replica = replica_of(model)
    dealt = batches(*samples(9), 3)
    replica.probe(dealt[0])
    assert replica.moving_buffers.names == []


def test_frozen_norm_layers_keep_still():
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))
    model[0].requires_grad_(False)
    replica = replica_of(model)
    dealt = batches(*samples(8), 2)
    replica.probe(dealt[0])
    assert replica.moving_buffers.names == []
    replica.apply(0, total(replica, dealt))
    assert torch.equal(model[0].running_mean, torch.zeros(6))


def test_a_parameter_that_no_lane_touched_has_gradient_zero():
    model = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])
    replica = replica_of(model, lambda m, b: F.cross_entropy(m[0](*b.inputs), b.target))
    found = total(replica, batches(*samples(4), 2))
    assert torch.equal(found.grads[2], torch.zeros(3, 6))


def test_clipping_works_on_what_was_reduced():
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    replica = replica_of(model, lr=1.0, clipping=Clipping(norm=0.01))
    before = torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])
    replica.apply(0, total(replica, batches(*samples(8), 4)))
    after = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    torch.testing.assert_close((after - before).norm(), torch.tensor(0.01), rtol=1e-3, atol=0)


def test_state_comes_back():
    x, y = samples(12)
    dealt = batches(x, y, 3)

    def fresh():
        torch.manual_seed(1)
        model = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        made = Replica(model, optimizer, cross_entropy, seed=3, schedule=schedule)
        made.probe(dealt[0])
        return made

    straight, broken = fresh(), fresh()
    for step in range(6):
        straight.apply(step, total(straight, dealt, step))
    for step in range(3):
        broken.apply(step, total(broken, dealt, step))
    import copy

    saved = copy.deepcopy(broken.state())
    again = fresh()
    again.load_state(saved)
    for step in range(3, 6):
        again.apply(step, total(again, dealt, step))
    for a, b in zip(straight.model.state_dict().values(), again.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert straight.lr == again.lr


def test_hooks_of_an_optimizer_are_called_and_change_nothing():
    def trained(hooked):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        replica = replica_of(model)
        calls = []
        if hooked:
            replica.optimizer.register_step_post_hook(lambda *_: calls.append(1))
        for step in range(3):
            replica.apply(step, total(replica, batches(*samples(8), 4), step))
        return model.weight.detach(), len(calls)

    (plain, none), (hooked, three) = trained(False), trained(True)
    assert (none, three) == (0, 3)
    assert torch.equal(plain, hooked)


def test_schedules_see_that_the_optimizer_was_called(recwarn):
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    replica = Replica(model, optimizer, cross_entropy, seed=0, schedule=schedule)
    replica.apply(0, total(replica, batches(*samples(8), 4)))
    assert replica.lr == pytest.approx(0.01)
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]
