"""Windows of a table of hourly measurements, and a model that forecasts its last column."""

import csv
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset


class Windows(Dataset):
    """Sample i: `past` rows from row i on, and the last column of the `ahead` rows that follow.

    Nothing is computed over the whole table (no mean, no scale): a sample knows only its own rows.
    """

    def __init__(self, path, past, ahead):
        with open(Path(__file__).parent / path, newline="") as file:
            rows = list(csv.reader(file))[1:]
        self.values = torch.tensor([[float(value) for value in row[1:]] for row in rows])
        self.past, self.ahead = past, ahead
        # One value per sample, so it is a column that the split can use: when the forecast is made.
        self.time = [row[0] for row in rows[past - 1 : len(rows) - ahead]]

    def __len__(self):
        return len(self.time)

    def __getitem__(self, i):
        now = i + self.past
        return self.values[i:now], self.values[now : now + self.ahead, -1]


class Net(nn.Module):
    """Two layers over the window, which is scaled by its own mean and deviation and scaled back at the end."""

    def __init__(self, past, ahead, columns=7, hidden=64):
        super().__init__()
        self.straight = nn.Linear(past, ahead)
        self.curved = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(past * columns, hidden),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(hidden, ahead),
        )

    def forward(self, x):
        mean, deviation = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-3
        x = (x - mean) / deviation
        last = x[:, -1, -1:]
        change = self.straight(x[:, :, -1] - last) + self.curved(x)
        return (last + change) * deviation[:, :, -1] + mean[:, :, -1]
