"""A task around the user's own: another shape, and a teacher. The same bits on any number of workers."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal import api
from shoal.compression import ProximalAdam
from shoal.compression.bounds import Bounds
from shoal.compression.lossless import cut_from_box
from shoal.data.batch import Batch
from shoal.errors import ErrorGroup, ShoalError
from shoal.spec.compression.config import DistilConfig
from shoal.spec.compression.steps import CutStep, Kept
from shoal.spec.load import make_job
from shoal.tasks.compressed import CompressedTask, DistilledTask, output_distance
from shoal.tasks.own_loss import OwnLossTask
from shoal.tasks.task import PlainTask, Task
from tests.conftest import MLP
from tests.tasks.test_own_loss import Answering

CUT = {"steps": [{"kind": "cut", "layers": {"0": {"out": "0-9"}, "3": {"inputs": "0-9"}}}]}


def net(width=6):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))


def a_batch():
    torch.manual_seed(0)
    return Batch((torch.rand(8, 4),), torch.randint(0, 3, (8,)), 8)


def test_the_loss_is_mixed_with_the_distance_to_the_teacher():
    torch.manual_seed(1)
    model, teacher, batch = net(), net(9), a_batch()
    task = DistilledTask(
        PlainTask(model, nn.CrossEntropyLoss()),
        DistilConfig(teacher="x", weight=0.25, temperature=3.0, features={"1": "1"}, feature_weight=2.0),
        lambda: teacher,
    )
    mine, wanted = model(*batch.inputs), teacher(*batch.inputs)
    soft = F.kl_div(F.log_softmax(mine / 3, 1), F.softmax(wanted / 3, 1), reduction="batchmean") * 9
    a, b = (F.normalize(one[1](one[0](batch.inputs[0]))) for one in (model, teacher))
    similar = (a @ a.T - b @ b.T).square().mean()
    expected = 0.75 * F.cross_entropy(mine, batch.target) + 0.25 * (soft + 2 * similar)
    assert torch.allclose(task.loss(model, batch), expected)
    task.loss(model, batch).backward()
    assert all(p.grad is None for p in teacher.parameters())
    assert all(p.grad is not None for p in model.parameters())
    assert task.evaluate(model, batch)[0] == F.cross_entropy(mine, batch.target)
    assert not model._forward_hooks
    assert not model[1]._forward_hooks


def test_a_model_with_its_own_loss_has_a_teacher():
    """Both are called by name, and their logits are compared."""
    model, teacher, batch = Answering(), Answering(), a_batch()
    nn.init.normal_(teacher.layer.weight)
    named = Batch(({"x": batch.inputs[0], "labels": batch.target},), batch.target, 8)
    task = DistilledTask(
        OwnLossTask(model, lambda example: {}), DistilConfig(teacher="x", weight=0.25), lambda: teacher
    )
    answer, wanted = (one(*batch.inputs, batch.target) for one in (model, teacher))
    total, weight = task.loss(model, named)
    assert torch.allclose(
        (total / weight).float(),
        0.75 * answer["loss"] + 0.25 * output_distance(answer["logits"], wanted["logits"], 2.0, classes=-1),
    )


def test_a_teacher_that_gives_its_own_answers_adds_nothing():
    model, batch = net(), a_batch()
    output = model(*batch.inputs)
    assert output_distance(output, output.detach(), 2.0, classes=1).abs() < 1e-6
    with pytest.raises(ShoalError, match="same shape"):
        output_distance(output, output[:, :2], 2.0, classes=1)


class Recalled(Task):
    """A task whose model returns its parameter, reshaped by the loss before torch's loss gets it."""

    def __init__(self, loss):
        self.loss_of = loss

    def loss(self, model, batch):
        return self.loss_of(model(*batch.inputs), batch.target)


class Constant(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.value = nn.Parameter(torch.randn(shape))

    def forward(self, x):
        return self.value


def taught_distance(loss, target, student, teacher):
    task = DistilledTask(Recalled(loss), DistilConfig(teacher="x", weight=1.0), lambda: teacher)
    return task.loss(student, Batch((torch.zeros(len(target)),), target, len(target)))


@pytest.mark.parametrize(
    ("shape", "loss", "target", "dimension"),
    [
        ((4, 3), F.cross_entropy, torch.zeros(4).long(), 1),
        ((4, 3, 5, 6), F.cross_entropy, torch.zeros(4, 5, 6).long(), 1),
        ((4, 5, 3), lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()), torch.zeros(4, 5).long(), 2),
        ((4, 5, 3), lambda o, t: F.cross_entropy(input=o.movedim(2, 1), target=t), torch.zeros(4, 5).long(), 2),
        ((4, 3, 5), lambda o, t: F.nll_loss(F.log_softmax(o, 1), t), torch.zeros(4, 5).long(), 1),
        ((4, 3), F.mse_loss, torch.zeros(4, 3), None),
        ((4, 3), lambda o, t: F.huber_loss(o, t) + 0.1 * o.square().mean(), torch.zeros(4, 3), None),
        ((4, 3), F.binary_cross_entropy_with_logits, torch.ones(4, 3), None),
    ],
    ids=["classes", "pixels", "tokens", "tokens moved", "nll", "numbers", "penalised numbers", "labels"],
)
def test_the_loss_tells_what_is_compared(shape, loss, target, dimension):
    """The same number added to all classes of a sample changes no probability; of other numbers it is a difference."""
    torch.manual_seed(0)
    teacher, student = Constant(*shape), Constant(*shape)
    with torch.no_grad():
        student.value.copy_(teacher.value + torch.randn(4).reshape(4, *[1] * (len(shape) - 1)))
    distance = taught_distance(loss, target, student, teacher)
    if dimension is None:
        assert distance.item() == pytest.approx((student.value - teacher.value).square().mean().item())
        return
    assert distance.abs() < 1e-6
    with torch.no_grad():
        student.value.copy_(teacher.value + torch.randn(shape))
    soft = [F.log_softmax(one.value.movedim(dimension, -1).reshape(-1, 3) / 2, 1) for one in (student, teacher)]
    wanted = F.kl_div(*soft, log_target=True, reduction="batchmean") * 4
    assert taught_distance(loss, target, student, teacher).item() == pytest.approx(wanted.item(), rel=1e-5)


class Pair(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


@pytest.mark.parametrize(
    ("loss", "model", "said"),
    [
        (lambda model, x: (model(x) ** 2).mean(), nn.Linear(4, 3), r"what the model's output \[8, 3\] is"),
        (lambda model, x: F.mse_loss(model.weight, x[:3]), nn.Linear(4, 3), "does not call the model"),
        (lambda model, x: F.mse_loss(model(x)[0], x[:, :3]), Pair(4, 3), "the model returns tuple"),
    ],
    ids=["own", "uncalled", "tuple"],
)
def test_outputs_that_cannot_be_compared_are_told(loss, model, said):
    class Own(Task):
        def loss(self, model, batch):
            return loss(model, batch.inputs[0])

    task = DistilledTask(Own(), DistilConfig(teacher="x"), lambda: type(model)(4, 3))
    with pytest.raises(ShoalError, match=said) as refused:
        task.loss(model, a_batch())
    assert (refused.value.code, refused.value.where) == ("SH402", "distil")
    Own.predicts_classes = True
    if said.startswith("what"):
        DistilledTask(Own(), DistilConfig(teacher="x"), lambda: nn.Linear(4, 3)).loss(model, a_batch()).backward()


def test_unknown_features_are_told():
    model = net()
    task = DistilledTask(
        PlainTask(model, nn.CrossEntropyLoss()), DistilConfig(teacher="x", features={"7": "1"}), lambda: net()
    )
    with pytest.raises(ShoalError, match="no module '7'"):
        task.loss(model, a_batch())


def test_the_shape_is_applied_once():
    task = CompressedTask(PlainTask(net(), nn.CrossEntropyLoss()), [CutStep(layers={"0": Kept(out="1,3")})])
    assert task.model() is task.model()
    assert task.to(torch.device("cpu"))[0].out_features == 2


def test_a_cut_and_taught_run_has_the_same_bits_on_one_worker_and_on_two(run):
    teacher = run(MLP, steps=20)
    features = {"0": "0", "3": "3"}  # of another width, and of the same
    taught = {"teacher": str(teacher.paths.model), "features": features}
    asked = {"shape": CUT, "distil": taught, "steps": 20}
    found = [run(MLP | asked, workers=workers) for workers in (1, 2)]
    assert found[0].receipt.parameters == 64 * 10 + 10 + 10 * 10 + 10
    assert len({one.receipt.state_sha256 for one in found}) == 1


@pytest.mark.long
def test_a_task_of_its_own_is_taught(run):
    """Teacher and student get what the task gives the model; the same bits on one worker and on two."""
    job = MLP | {"model": None, "loss": None, "metrics": [], "task": "compressible.py:OwnInputs", "steps": 20}
    teacher = run(job)
    taught = job | {"distil": {"teacher": str(teacher.paths.model), "weight": 0.9}, "seed": 1}
    one, two, alone = run(taught), run(taught, workers=2), run(job | {"seed": 1})
    assert one.receipt.state_sha256 == two.receipt.state_sha256
    assert one.receipt.weights_sha256 != alone.receipt.weights_sha256


def test_a_teacher_of_another_class_is_built_from_its_own_name(run):
    """A linear model teaches an MLP; without its name, its weights do not fit."""
    linear = {"name": "torch.nn:Linear", "args": {"in_features": 64, "out_features": 10}}
    teacher = run(MLP | {"model": linear}, steps=20)
    asked = {"distil": {"teacher": str(teacher.paths.model), "model": linear}, "steps": 8}
    taught, plain = run(MLP | asked), run(MLP, steps=8)
    assert taught.error is None
    assert taught.receipt.parameters == plain.receipt.parameters
    assert taught.receipt.weights_sha256 != plain.receipt.weights_sha256
    refused = run(MLP | {"distil": {"teacher": str(teacher.paths.model)}, "steps": 8}).error
    assert (refused.code, refused.where) == ("SH406", "distil.teacher")


def test_rounded_training_starts_from_the_weights_of_a_plain_run(run):
    plain = run(MLP, steps=20)
    rename = {"0.weight": "0.parametrizations.weight.original"}
    job = MLP | {"shape": {"steps": [{"kind": "round", "layers": {"0": 3}}]}, "steps": 20}
    made = run(job, init_from={"path": str(plain.paths.model), "rename": rename}, workers=2)
    assert made.error is None
    weight = api.load(made.paths.root)[0].weight
    assert max(len(row.unique()) for row in weight) <= 7
    assert made.receipt.init_from.loaded == made.receipt.init_from.tensors


def test_shape_and_teacher_are_part_of_the_identity_of_a_job(job_dir):
    plain, cut = (make_job(MLP | more, base_dir=str(job_dir)) for more in ({}, {"shape": CUT}))
    assert plain.sha256() != cut.sha256()
    asked = make_job(MLP | {"compress": {"target": {"size": "25%"}, "max_drop": "1%"}}, base_dir=str(job_dir))
    assert asked.sha256() == plain.sha256()
    assert asked.compress.target.size == 0.25


@pytest.mark.parametrize(
    "section",
    [
        {"compress": {"target": {"size": "much"}}},
        {"compress": {"steps": ["magic"]}},
        {"shape": {"steps": []}},
        {"shape": CUT, "shard": "fsdp", "workers": 2},
    ],
)
def test_bad_sections_are_refused(job_dir, section):
    with pytest.raises((ErrorGroup, ShoalError)):
        make_job(MLP | section, base_dir=str(job_dir))


def test_group_shrinkage_makes_neurons_provably_dead():
    """A task that one neuron can do: of 32, most end with rows of zeros, and a proof removes them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = ProximalAdam(model.parameters(), lr=0.01, shrink=0.3)
    x = torch.rand(256, 4)
    y = torch.relu(x[:, :1] - x[:, 1:2])
    for _ in range(400):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    box = Bounds(torch.zeros(1, 4).double(), torch.ones(1, 4).double())
    found = cut_from_box(model.double(), box)
    assert found.removed["0"] > 16
    assert F.mse_loss(model(x.double()), y.double()) < 0.3 * y.var()
