"""What a plain task makes of outputs and targets, and what metrics are given."""

import math

import pytest
import torch
from torch import nn

from shoal.data.batch import Batch
from shoal.errors import ShoalError
from shoal.spec.base import Ref
from shoal.tasks.metrics import MetricAccumulator, build_metrics, merge_lanes
from shoal.tasks.task import PlainTask, Task, align_shapes


@pytest.mark.parametrize("classes_last", [True, False])
def test_perplexity_takes_either_order(classes_last):
    torch.manual_seed(0)
    output, target = torch.randn(6, 5, 9), torch.randint(0, 9, (6, 5))
    loss = nn.functional.cross_entropy(output.movedim(-1, 1), target)
    given = output if classes_last else output.movedim(-1, 1)
    names = [Ref(name="perplexity"), Ref(name="accuracy")]
    lanes = [MetricAccumulator(build_metrics(names, (given, target), base_dir="."), logits=True) for _ in range(2)]
    for lane, part in zip(lanes, (slice(0, 4), slice(4, 6)), strict=True):
        lane.update(loss, given[part], Batch((), target[part], len(target[part])))
    values = merge_lanes(lanes)
    assert values["perplexity"] == pytest.approx(math.exp(loss))
    assert values["accuracy"] == pytest.approx((output.argmax(-1) == target).float().mean().item())


def test_as_many_classes_as_places_is_not_guessed():
    with pytest.raises(ShoalError, match="which of the two 7 counts classes"):
        align_shapes(torch.randn(3, 7, 7), torch.randint(0, 7, (3, 7)))


def test_a_square_batch_is_no_riddle():
    output, target = torch.randn(5, 5), torch.randint(0, 5, (5,))
    assert align_shapes(output, target)[0] is output


@pytest.mark.parametrize(
    ("output", "target", "shapes"),
    [
        (torch.randn(4, 1), torch.randn(4), ((4,), (4,))),
        (torch.randn(4, 3, 1), torch.randn(4, 3), ((4, 3), (4, 3))),
        (torch.randn(4, 3), torch.zeros(4, dtype=torch.int64), ((4, 3), (4,))),
        (torch.randn(4, 6, 9), torch.zeros(4, 6, dtype=torch.int64), ((4, 9, 6), (4, 6))),
        (torch.randn(4, 9, 6), torch.zeros(4, 6, dtype=torch.int64), ((4, 9, 6), (4, 6))),
        (torch.randn(4, 6, 9), torch.randn(4, 6), ((4, 6, 9), (4, 6))),
    ],
)
def test_shapes_are_aligned_where_one_reading_makes_sense(output, target, shapes):
    aligned = align_shapes(output, target)
    assert tuple(tuple(value.shape) for value in aligned) == shapes


def test_a_binary_target_gets_the_type_of_the_output():
    output, target = align_shapes(torch.randn(3, 1, dtype=torch.float64), torch.tensor([0, 1, 1]))
    assert (output.shape, target.dtype, target.tolist()) == ((3,), torch.float64, [0.0, 1.0, 1.0])


def test_outputs_that_are_no_tensors_are_left_alone():
    output, target = {"a": torch.randn(4, 1)}, torch.randn(4)
    assert align_shapes(output, target) == (output, target)


# ---- plain tasks ----


def batch(target):
    return Batch((torch.arange(8.0).reshape(4, 2),), target, 4)


def test_a_loss_of_torch_is_not_broadcast():
    model, target = nn.Linear(2, 1), torch.tensor([0.0, 1.0, 2.0, 3.0])
    found = PlainTask(model, nn.MSELoss()).loss(model, batch(target))
    assert torch.equal(found, ((model(*batch(target).inputs)[:, 0] - target) ** 2).mean())


def test_a_loss_of_the_user_gets_what_the_model_gave():
    seen = []

    def loss(output, target):
        seen.append((output.shape, target.dtype))
        return output.sum()

    model = nn.Linear(2, 1)
    PlainTask(model, loss).loss(model, batch(torch.tensor([0, 1, 1, 0])))
    assert seen == [((4, 1), torch.int64)]


@pytest.mark.parametrize(
    ("loss", "logits"),
    [(nn.CrossEntropyLoss(), True), (nn.BCEWithLogitsLoss(), True), (nn.NLLLoss(), None), (torch.dist, None)],
)
def test_the_loss_says_whether_outputs_are_logits(loss, logits):
    assert PlainTask(nn.Linear(2, 2), loss).logits is logits


def test_an_evaluation_of_a_plain_task_is_one_pass():
    calls = []
    model = nn.Linear(2, 3)
    model.register_forward_hook(lambda *_: calls.append(1))
    task, given = PlainTask(model, nn.CrossEntropyLoss()), batch(torch.tensor([0, 1, 2, 0]))
    loss, output = task.evaluate(model, given)
    assert (len(calls), task.evaluates_in_one_pass) == (1, True)
    assert torch.equal(loss, task.loss(model, given))
    assert torch.equal(output, task.predict(model, given))


def test_the_weights_of_a_loss_move_with_the_model():
    loss = nn.CrossEntropyLoss(weight=torch.ones(3))
    model = PlainTask(nn.Linear(2, 3), loss).to(torch.device("meta"))
    assert (loss.weight.device.type, model.weight.device.type) == ("meta", "meta")


# ---- tasks of the user ----


class Own(Task):
    def model(self):
        return nn.Linear(2, 3)

    def loss(self, model, batch):
        return model(*batch.inputs).sum()


def test_a_task_needs_a_model_and_a_loss():
    with pytest.raises(NotImplementedError, match=r"model\(\)"):
        Task().model()
    with pytest.raises(NotImplementedError, match=r"loss\(\)"):
        Task().loss(nn.Linear(2, 3), batch(None))


def test_a_task_of_ones_own_is_evaluated_by_loss_and_predict():
    task, model, given = Own(), Own().model(), batch(None)
    loss, output = task.evaluate(model, given)
    assert torch.equal(loss, output.sum())
    assert not task.evaluates_in_one_pass
    assert (task.metrics(), task.optimizer(model), task.state(), task.logits) == ({}, None, None, None)
