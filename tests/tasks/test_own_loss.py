"""`loss: model`: the mean that a model computes itself is one over the labels that it does not ignore."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from shoal.data.batch import Batch
from shoal.tasks.own_loss import OwnLossTask

CLASSES, SAMPLES = 3, 8


class Answering(nn.Module):
    """As models of Hugging Face for the classes of samples or of tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, CLASSES)

    def forward(self, x, labels):
        logits = self.layer(x)
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
