"""Evaluation is a function of the weights and the data alone."""

import numpy as np
import torch
import torchmetrics
from torch import nn

from shoal import Batch, Task
from shoal.data.assemble import Part
from shoal.parallel.replica import Replica
from shoal.train.evaluate import Evaluator


class Held:
    """Four samples in memory: outputs are the inputs times the weight."""

    in_memory, per_sample = True, False

    def take(self, ids):
        return Batch((torch.tensor([[0.2], [0.4], [0.6], [0.8]])[ids],), torch.tensor([0, 0, 1, 1])[ids], len(ids))


class Shy(Task):
    """Does not say whether its predictions are logits."""

    def loss(self, model, batch):
        return self.predict(model, batch).mean()

    def predict(self, model, batch):
        return model(*batch.inputs).squeeze(-1)

    def metrics(self, example=None):
        return {"accuracy": torchmetrics.classification.BinaryAccuracy()}


def replica(weight):
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, weight)
    return Replica(model, torch.optim.SGD(model.parameters(), 0.1), Shy().loss, seed=0)


def test_what_was_measured_before_changes_nothing():
    part = Part("validation", Held(), np.arange(4), None)
    used, fresh = (Evaluator(Shy(), lanes=2, chunk=4, seed=0) for _ in range(2))
    used.measure(replica(-2.0), part)  # these look like logits, the next like probabilities
    assert used.measure(replica(1.0), part) == fresh.measure(replica(1.0), part)
