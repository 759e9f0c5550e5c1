"""Evaluation is a function of the weights and the data alone."""

import numpy as np
import torch
import torchmetrics
from torch import nn

from shoal import Batch, Task
from shoal.data.datasets import DatasetSplit
from shoal.lanes.replica import Replica
from shoal.tasks.evaluation import Evaluator


class FourSampleSource:
    """Four samples in memory: outputs are the inputs times the weight."""

    in_memory, per_sample = True, False

    def take(self, ids):
        return Batch((torch.tensor([[0.2], [0.4], [0.6], [0.8]])[ids],), torch.tensor([0, 0, 1, 1])[ids], len(ids))


class UnspecifiedLogitsTask(Task):
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
    return Replica(model, torch.optim.SGD(model.parameters(), 0.1), UnspecifiedLogitsTask().loss, seed=0)


def test_what_was_measured_before_changes_nothing():
    part = DatasetSplit("validation", FourSampleSource(), np.arange(4), None)
    used, fresh = (Evaluator(UnspecifiedLogitsTask(), lanes=2, chunk_size=4, seed=0) for _ in range(2))
    used.evaluate(replica(-2.0), part)  # these look like logits, the next like probabilities
    assert used.evaluate(replica(1.0), part) == fresh.evaluate(replica(1.0), part)
