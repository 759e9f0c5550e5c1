"""`loss: model`: the mean that a model computes itself is one over the labels that it does not ignore."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from shoal.data.batch import Batch
from shoal.errors import ShoalError
from shoal.tasks.own_loss import NamedOutputs, OwnLossTask, with_plain_inputs

CLASSES, SAMPLES = 3, 8


class Answering(nn.Module):
    """As models of Hugging Face for the classes of samples or of tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, CLASSES)

    def forward(self, x, labels=None):
        logits = self.layer(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": functional.cross_entropy(logits.flatten(0, -2), labels.flatten()), "logits": logits}


@pytest.mark.parametrize("tokens", [(), (5,)])
@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_ignored_labels_weigh_nothing_on_any_number_of_lanes(tokens, lanes):
    model, generator = Answering(), torch.Generator().manual_seed(2)
    x = torch.randn(SAMPLES, *tokens, 4, generator=generator)
    labels = torch.randint(0, CLASSES, (SAMPLES, *tokens), generator=generator)
    labels[: SAMPLES // 4] = labels[-1:] = -100  # of four lanes, one ignores all and one half
    task = OwnLossTask(model, lambda example: {})
    parts = zip(x.chunk(lanes), labels.chunk(lanes), strict=True)
    found = [task.loss(model, Batch(({"x": a, "labels": b},), b, len(b))) for a, b in parts]
    total, weight = (sum(float(one[i].detach()) for one in found) for i in (0, 1))
    assert weight == int((labels != -100).sum())
    assert total / weight == pytest.approx(float(model(x, labels)["loss"]), rel=1e-6)


def test_weights_of_samples_are_refused():
    """The model gives one number for all of them: it would ignore the weights."""
    model, labels = Answering(), torch.zeros(2, dtype=torch.int64)
    batch = Batch(({"x": torch.rand(2, 4), "labels": labels},), labels, 2, torch.tensor([1.0, 2.0]))
    for compute in (OwnLossTask.loss, OwnLossTask.evaluate):
        with pytest.raises(ShoalError, match="one loss for all samples") as caught:
            compute(OwnLossTask(model, lambda example: {}), model, batch)
        assert caught.value.code == "SH832"


def ForCausalLMLoss():
    """Its name says that a position is compared with the next label."""


class Causal(Answering):
    loss_function = staticmethod(ForCausalLMLoss)

    def forward(self, x, labels=None):
        found = super().forward(x)
        if labels is not None:
            shifted = found["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            found["loss"] = functional.cross_entropy(*shifted)
        return found


@pytest.mark.parametrize(("make", "tokens"), [(Answering, ()), (Answering, (5,)), (Causal, (5,))])
def test_logits_from_elsewhere_have_the_loss_of_the_users_model(make, tokens):
    """An ONNX file gives logits alone."""
    model, generator = make(), torch.Generator().manual_seed(2)
    labels = torch.randint(0, CLASSES, (SAMPLES, *tokens), generator=generator)
    labels[2] = -100
    batch = Batch(({"x": torch.randn(SAMPLES, *tokens, 4, generator=generator), "labels": labels},), labels, SAMPLES)
    plain, inputs = with_plain_inputs(model, batch.inputs)
    assert torch.equal(plain(*inputs), model(*inputs)["logits"])
    task, back = OwnLossTask(model, lambda example: {}), NamedOutputs(plain, model)
    (loss, weight), logits = task.evaluate(model, batch)
    (other_loss, other_weight), other_logits = task.evaluate(back, batch)
    assert torch.allclose(loss, other_loss)
    assert weight == other_weight
    assert torch.equal(logits, other_logits)
    numbers = torch.rand(SAMPLES)
    with pytest.raises(ShoalError, match="without a loss"):
        task.loss(back, Batch(({"x": torch.rand(SAMPLES, 4), "labels": numbers},), numbers, SAMPLES))
