"""A network in two parts, a second one that takes over the first part, and some of scikit-learn's digits."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset


def digits(first, last):
    """The digits from `first` to `last` as images; classes count from 0."""
    images, labels = load_digits(return_X_y=True)
    chosen = (labels >= first) & (labels <= last)
    images = torch.tensor(images[chosen], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    return TensorDataset(images, torch.tensor(labels[chosen] - first))


def layer(channels_in, channels_out):
    convolution = nn.Conv2d(channels_in, channels_out, 3, padding=1)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels_out), nn.ReLU(), nn.MaxPool2d(2))


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.early = layer(1, 16)
        self.late = nn.Sequential(layer(16, 32), nn.Flatten())

    def forward(self, x):
        return self.late(self.early(x))


class Net(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        self.body = Body()
        self.head = nn.Linear(128, classes)

    def forward(self, x):
        return self.head(self.body(x))


class NewNet(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        self.backbone = Body()
        self.dropout = nn.Dropout(0.2)
        self.classifier = nn.Linear(128, classes)

    def forward(self, x):
        return self.classifier(self.dropout(self.backbone(x)))
