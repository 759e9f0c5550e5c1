"""The LightningModule of original_lightning.py as a Task."""

import torch
import torchmetrics
from torch.nn import functional

import shoal
from net import Net


class LitDigits(shoal.Task):
    def __init__(self, lr=0.01):
        self.lr = lr

    def model(self):
        return Net()

    def loss(self, model, batch):  # training_step
        return functional.cross_entropy(model(*batch.inputs), batch.target)

    def metrics(self, example=None):  # self.log in validation_step
        return {"accuracy": torchmetrics.Accuracy(task="multiclass", num_classes=10)}

    def optimizer(self, model):  # configure_optimizers
        return torch.optim.AdamW(model.parameters(), lr=self.lr)
