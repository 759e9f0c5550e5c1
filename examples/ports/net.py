"""What the originals and their ports share: a network, and digits of scikit-learn as a torch dataset."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset


class Net(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        torch.manual_seed(1)  # so that an original and its port begin with the same weights
        self.layers = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def forward(self, x):
        return self.layers(x)


class Digits(Dataset):
    def __init__(self, train=True):
        found = load_digits()
        part = slice(0, 1400) if train else slice(1400, None)
        self.images = torch.tensor(found.data[part] / 16, dtype=torch.float32)
        self.targets = torch.tensor(found.target[part])

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, i):
        return self.images[i], self.targets[i]
