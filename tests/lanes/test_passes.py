"""Steps in several passes, and what belongs to a lane or to a replica besides its weights."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shoal.data.batch import Batch
from shoal.errors import ShoalError
from shoal.lanes.carry import LaneCarry
from shoal.lanes.gradient_checkpointing import checkpoint_modules
from shoal.lanes.loss_scale import LossScale
from shoal.lanes.passes import ClosureReplica, PhasedReplica
from shoal.lanes.reduction_tree import TreeSum
from shoal.lanes.replica import Replica, add
from shoal.lanes.rng import LaneRng
from shoal.lanes.weight_average import WeightAverage
from shoal.net.errors import LinkError
from shoal.spec import seeds
from tests.fixtures.loops import Blocks, Dcgan, Gan, Images

CPU = torch.device("cpu")


def cross_entropy(model, batch):
    return F.cross_entropy(model(*batch.inputs), batch.target)


def digits(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Batch((torch.randn(n, 64, generator=generator),), torch.randint(0, 10, (n,), generator=generator), n)


class Lanes:
    """The passes of a step whose lanes are all here. `fail_at`: the pass in which a member is lost."""

    keeps_undo = True

    def __init__(self, batch, lanes, fail_at=None):
        self.batches, self.size = batch.chunk(lanes), batch.size
        self.fail_at, self.passes = fail_at, 0

    def total(self, compute):
        if self.passes == self.fail_at:
            raise LinkError("a member is lost")
        self.passes += 1
        sums = TreeSum(len(self.batches), add)
        for lane, batch in enumerate(self.batches):
            sums.push_lane(lane, compute(lane, batch, batch.size / self.size))
        return sums.total()


def gan_replica(task=None):
    torch.manual_seed(0)
    task = task or Dcgan()
    model = Gan()
    optimizers = task.optimizers(model)
    replica = PhasedReplica(model, optimizers["discriminator"], task.loss, seed=3)
    replica.bind(task.step, optimizers, {})
    replica.probe(images(4))
    return replica


def images(n):
    return Batch((Images(n).images,), torch.ones(n), n)


def flat(replica):
    return torch.cat([value.flatten().double() for value in replica.model.state_dict().values()])


def test_a_gan_of_one_lane_has_the_bits_of_pytorchs_own_loop():
    """The loop of PyTorch's example, with the random numbers of lane 0."""
    replica, batch = gan_replica(), images(6)
    torch.manual_seed(0)
    model = Gan()
    optimizers = Dcgan().optimizers(model)
    netG, netD, criterion = model.generator, model.discriminator, nn.BCELoss()
    rng = LaneRng(CPU)
    for step in range(3):
        rng.seed_all(3, seeds.LANE, step, 0)
        # (1) Update D network: maximize log(D(x)) + log(1 - D(G(z)))
        netD.zero_grad()
        label = torch.full((6,), 1.0)
        criterion(netD(batch.inputs[0]), label).backward()
        fake = netG(torch.randn(6, 8, 1, 1))
        label.fill_(0.0)
        criterion(netD(fake.detach()), label).backward()
        optimizers["discriminator"].step()
        # (2) Update G network: maximize log(D(G(z)))
        netG.zero_grad()
        label.fill_(1.0)
        criterion(netD(fake), label).backward()
        optimizers["generator"].step()
        replica.begin_step()
        replica.take_step(step, Lanes(batch, 1))
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in replica.model.state_dict().items())


@pytest.mark.parametrize("fail_at", [0, 1])
def test_a_step_that_is_lost_in_the_middle_leaves_no_trace(fail_at):
    replica = gan_replica()
    replica.begin_step()
    replica.take_step(0, Lanes(images(8), 2))
    calm = gan_replica()
    calm.load_state(copy.deepcopy(replica.state()))
    before = flat(replica)
    replica.begin_step()
    with pytest.raises(LinkError):
        replica.take_step(1, Lanes(images(8), 2, fail_at=fail_at))
    if fail_at:
        assert not torch.equal(flat(replica), before), "the first phase has changed the discriminator"
    replica.undo_step()
    assert torch.equal(flat(replica), before)
    for one in (replica, calm):
        one.begin_step()
        one.take_step(1, Lanes(images(8), 2))
    assert torch.equal(flat(replica), flat(calm))


def test_a_phase_with_another_name_is_refused():
    class Other(Dcgan):
        def step(self, model, batch):
            for loss, _ in super().step(model, batch):
                yield loss, "generater"

    with pytest.raises(ShoalError, match="the optimizers are discriminator, generator") as caught:
        gan_replica(Other())
    assert caught.value.code == "SH861"


@pytest.mark.parametrize("more", [False, True])
def test_phases_that_differ_between_batches_are_refused(more):
    class Unsteady(Dcgan):
        def step(self, model, batch):
            yield from itertools.islice(super().step(model, batch), 2 if more or batch.size == 4 else 1)
            if more and batch.size != 4:
                yield from super().step(model, batch)

    replica = gan_replica(Unsteady())
    replica.begin_step()
    with pytest.raises(ShoalError) as caught:
        replica.take_step(0, Lanes(images(8), 1))
    assert caught.value.code == "SH862"


def test_a_phase_may_be_skipped():
    class Skips(Dcgan):
        def step(self, model, batch):
            for loss, name in super().step(model, batch):
                yield (None if name == "generator" else loss), name

    replica = gan_replica(Skips())
    before = copy.deepcopy(replica.model.state_dict())
    replica.begin_step()
    replica.take_step(0, Lanes(images(8), 2))
    after = replica.model.state_dict()
    assert torch.equal(after["generator.main.0.weight"], before["generator.main.0.weight"])
    assert not torch.equal(after["discriminator.main.0.weight"], before["discriminator.main.0.weight"])


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10))


def test_lbfgs_of_one_lane_has_the_bits_of_pytorchs_own_loop():
    batch, settings = digits(20), {"lr": 0.5, "max_iter": 5, "line_search_fn": "strong_wolfe"}
    plain, model = mlp(), mlp()
    reference = torch.optim.LBFGS(plain.parameters(), **settings)

    def closure():
        reference.zero_grad()
        loss = cross_entropy(plain, batch)
        loss.backward()
        return loss

    replica = ClosureReplica(model, torch.optim.LBFGS(model.parameters(), **settings), cross_entropy, seed=1)
    for step in range(3):
        expected = reference.step(closure)
        replica.begin_step()
        passes = Lanes(batch, 1)
        assert replica.take_step(step, passes).item() == pytest.approx(expected.item())
        assert passes.passes > 1
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_a_closure_that_is_lost_leaves_no_trace():
    model = mlp()
    replica = ClosureReplica(model, torch.optim.LBFGS(model.parameters(), max_iter=4), cross_entropy, seed=1)
    replica.begin_step()
    replica.take_step(0, Lanes(digits(20), 2))
    before, state = flat(replica), copy.deepcopy(replica.state())
    replica.begin_step()
    with pytest.raises(LinkError):
        replica.take_step(1, Lanes(digits(20), 2, fail_at=2))
    replica.undo_step()
    assert torch.equal(flat(replica), before)
    again = replica.state()["optimizer"]["state"][0]
    assert again["n_iter"] == state["optimizer"]["state"][0]["n_iter"]


# ---- weights that are evaluated ----


def trained(replica, steps, batch):
    for step in range(steps):
        replica.begin_step()
        replica.apply(step, replica.forward_backward(step, 0, batch, share=1.0))


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_an_average_is_that_of_torch_and_training_keeps_its_bits(kind):
    batch, model, plain = digits(20), mlp(), mlp()
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), cross_entropy, seed=1)
    replica.average = WeightAverage(model, kind=kind, decay=0.9, start=0, every=1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    average = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.9) if kind == "ema" else None)
    for _ in range(5):
        optimizer.zero_grad()
        cross_entropy(plain, batch).backward()
        optimizer.step()
        average.update_parameters(plain)
    trained(replica, 5, batch)
    with replica.evaluation_weights():
        for found, expected in zip(model.parameters(), average.module.parameters(), strict=True):
            torch.testing.assert_close(found, expected)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_an_average_begins_at_its_step():
    model = mlp()
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), cross_entropy, seed=1)
    replica.average = WeightAverage(model, kind="swa", decay=0.9, start=3, every=2)
    trained(replica, 2, digits(20))
    assert not replica.has_evaluation_weights
    trained(replica, 3, digits(20))
    assert replica.has_evaluation_weights
    assert torch.equal(replica.average.values["0.weight"], model[0].weight)


def test_an_average_leaves_out_what_is_frozen():
    """Also one of a checkpoint that has it."""
    model = mlp()
    model[0].requires_grad_(False)
    replica = Replica(model, torch.optim.SGD(model[2].parameters(), lr=0.1), cross_entropy, seed=1)
    replica.average = average = WeightAverage(model, kind="ema", decay=0.9, start=0, every=1)
    trained(replica, 2, digits(20))
    assert set(average.values) == {"2.weight", "2.bias"}
    average.load_state({"count": 2, "values": average.values | {"0.weight": model[0].weight.detach()}})
    assert set(average.values) == {"2.weight", "2.bias"}
    before = model[2].weight.detach().clone()
    with replica.evaluation_weights():
        assert torch.equal(model[2].weight, average.values["2.weight"])
    assert torch.equal(model[2].weight, before)


def test_an_average_is_loaded_to_the_device_of_its_model():
    model = mlp()
    average = WeightAverage(model, kind="ema", decay=0.9, start=0, every=1)
    average.update(0)
    state = average.state()
    other = WeightAverage(mlp().to("meta"), kind="ema", decay=0.9, start=0, every=1)
    other.load_state(state)
    other.update(1)  # both are on one device
    assert {value.device.type for value in other.values.values()} == {"meta"}
    average.load_state(state)
    assert average.values["0.weight"].data_ptr() != state["values"]["0.weight"].data_ptr()


class Modes(torch.optim.SGD):
    """As schedule-free optimizers: other weights in evaluation, and a way back that passes."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.mode = "eval"

    def train(self):
        if self.mode == "eval" and self.state_dict()["state"]:
            self._scale(1 / 3)
        self.mode = "train"

    def eval(self):
        self._scale(3.0)
        self.mode = "eval"

    @torch.no_grad()
    def _scale(self, factor):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(factor)

    def step(self, closure=None):
        assert self.mode == "train"
        return super().step(closure)


def test_an_optimizer_with_modes_is_evaluated_in_its_own():
    model = mlp()
    replica = Replica(model, Modes(model.parameters(), lr=0.1), cross_entropy, seed=1)
    trained(replica, 2, digits(20))
    before = [p.detach().clone() for p in model.parameters()]
    with replica.evaluation_weights():
        assert replica.optimizer.mode == "eval"
        for found, trained_value in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(found, trained_value * 3)
    assert replica.optimizer.mode == "train"
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


# ---- the scale of losses ----


def test_a_loss_scale_changes_no_bit_of_a_finite_update():
    batch, plain, scaled = digits(20), mlp(), mlp()
    one = Replica(plain, torch.optim.SGD(plain.parameters(), lr=0.1), cross_entropy, seed=1)
    other = Replica(scaled, torch.optim.SGD(scaled.parameters(), lr=0.1), cross_entropy, seed=1)
    other.loss_scale = LossScale(1024.0)
    for replica in (one, other):
        trained(replica, 3, batch)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), scaled.parameters(), strict=True))


def test_an_update_that_is_not_finite_is_skipped_and_the_scale_adapts():
    scale = LossScale(2.0**20, growth_interval=2)
    model = mlp()
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), cross_entropy, seed=1)
    replica.loss_scale = scale
    before = [p.detach().clone() for p in model.parameters()]
    total = replica.forward_backward(0, 0, digits(4), share=1.0)
    total.grads[1][0] = torch.inf
    replica.begin_step()
    replica.apply(0, total)
    assert scale.scale == 2.0**19
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    trained(replica, 2, digits(4))
    assert scale.scale == 2.0**20
    other = mlp()
    again = Replica(other, torch.optim.SGD(other.parameters(), lr=0.1), cross_entropy, seed=1)
    again.loss_scale = LossScale()
    again.load_state(copy.deepcopy(replica.state()))  # of a checkpoint, or of a peer
    assert again.loss_scale.state() == scale.state() != LossScale().state()


# ---- gradient checkpointing ----


def test_gradient_checkpointing_changes_no_bit():
    """Dropout is repeated, and running statistics move once."""
    found = []
    for patterns in ([], ["blocks.*"]):
        torch.manual_seed(0)
        model = Blocks()
        checkpoint_modules(model, patterns)
        replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), cross_entropy, seed=1)
        replica.probe(digits(8))
        for step in range(2):
            replica.begin_step()
            sums = TreeSum(2, add)
            for lane, batch in enumerate(digits(16).chunk(2)):
                sums.push_lane(lane, replica.forward_backward(step, lane, batch, share=0.5))
            replica.apply(step, sums.total())
        found.append(model.state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_gradient_checkpointing_recomputes_the_outermost_modules_that_match():
    model, calls = Blocks(), []
    checkpoint_modules(model, ["blocks.*"])
    for block in model.blocks:
        block[0].register_forward_hook(lambda *_: calls.append(1))
    cross_entropy(model, digits(8)).backward()
    assert len(calls) == 6  # three blocks, twice
    with torch.no_grad():
        cross_entropy(model, digits(8))
    assert len(calls) == 9


@pytest.mark.parametrize(("wanted", "words"), [(True, "gradient_checkpointing_enable"), (["bloks.*"], "no module")])
def test_gradient_checkpointing_that_fits_nothing_is_refused(wanted, words):
    with pytest.raises(ShoalError, match=words) as caught:
        checkpoint_modules(Blocks(), wanted)
    assert caught.value.code == "SH864"
    assert "blocks" in caught.value.fix


# ---- what lanes carry ----


class Counter:
    carry: dict


def carried(carry, task, step, lane):
    carry.give(step, lane)
    seen = task.carry.get("seen", torch.zeros(1))
    task.carry["seen"] = seen + 1 + lane
    carry.take(lane)
    return seen.item()


def test_a_lane_gets_what_it_left_at_the_last_step_that_counts():
    task = Counter()
    carry = LaneCarry(task, steps_per_epoch=3, device=CPU)
    seen = []
    for step, counts in ((0, True), (1, False), (1, True), (2, True), (3, True), (4, True)):
        seen.append([carried(carry, task, step, lane) for lane in (0, 1)])
        carry.commit() if counts else carry.drop()
    # the discarded step is repeated with the same values, and an epoch of three steps begins with nothing
    assert seen == [[0, 0], [1, 2], [1, 2], [2, 4], [0, 0], [1, 2]]


def test_what_lanes_carry_is_saved_and_comes_from_peers():
    task = Counter()
    here = LaneCarry(task, steps_per_epoch=9, device=CPU)
    for lane in (0, 1):
        carried(here, task, 0, lane)
    there = LaneCarry(other := Counter(), steps_per_epoch=9, device=CPU)
    carried(there, other, 0, 0)
    there.add_peers({1: here.new[1]})
    here.commit()
    there.commit()
    assert here.state().keys() == there.state().keys() == {0, 1}
    again = LaneCarry(task, steps_per_epoch=9, device=CPU)
    again.load_state(there.state())
    assert [carried(again, task, 1, lane) for lane in (0, 1)] == [1, 2]


# ---- a device ----


def test_a_step_never_reads_a_value_of_the_device():
    """On the meta device tensors have no values: whatever waits for one fails. A GPU would be waited for."""
    model = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)).to("meta")

    def loss(model, batch):
        return F.cross_entropy(model(*batch.inputs), batch.target, reduction="sum"), batch.size

    replica = Replica(model, torch.optim.AdamW(model.parameters(), fused=False), loss, seed=1)
    replica.average = WeightAverage(model, kind="ema", decay=0.9, start=0, every=1)
    replica._set_moving_buffers(["1.running_mean", "1.running_var", "1.num_batches_tracked"])
    for step in range(2):
        replica.begin_step()
        sums = TreeSum(2, add)
        for lane, batch in enumerate(digits(8).chunk(2)):
            sums.push_lane(lane, replica.forward_backward(step, lane, batch.to("meta"), share=0.5))
        assert replica.apply(step, sums.total()).device.type == "meta"
