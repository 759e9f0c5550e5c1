"""Networks of the tests: with a residual and batch norm, and with attention written by hand."""

import itertools

import torch
from torch import nn
from torch.nn import functional as F


class Residual(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.second_norm = nn.BatchNorm2d(width)
        self.third = nn.Conv2d(width, 6, 3)
        self.head = nn.Linear(24, 5)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        x = F.max_pool2d(x + torch.relu(self.second_norm(self.second(x))), 2)
        return self.head(torch.relu(self.third(x)).flatten(1))


class ResidualBlock(nn.Module):
    """The block of a ResNet, with a projection where width or resolution changes."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        self.first = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm, self.second_norm = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.short = nn.Sequential()
        if stride > 1 or inputs != width:
            self.short = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x):
        y = F.relu(self.norm(self.first(x)))
        return F.relu(self.second_norm(self.second(y)) + self.short(x))


class ResNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(
            ResidualBlock(width, width, 1), ResidualBlock(width, 2 * width, 2), ResidualBlock(2 * width, 4 * width, 2)
        )
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x):
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class LeNet5(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 6, 5), nn.MaxPool2d(2), nn.Conv2d(6, 8, 5), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(128, 20), nn.ReLU(), nn.Linear(20, 10),
        )  # fmt: skip


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, time, width = x.shape
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (one.view(batch, time, self.heads, width // self.heads).transpose(1, 2) for one in parts)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.second_norm(x))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.places = nn.Parameter(torch.zeros(12, 16))
        self.blocks = nn.Sequential(Block(16, 2), Block(16, 2))
        self.head = nn.Linear(16, 20)

    def forward(self, x):
        return self.head(self.blocks(self.tokens(x) + self.places[: x.shape[1]]))


class Apart(nn.Module):
    """Attention with separate layers whose code follows from the size of a head."""

    def __init__(self, width=16, head=4):
        super().__init__()
        self.head = head
        self.tokens = nn.Embedding(20, width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.classes = nn.Linear(width, 3)

    def forward(self, x):
        x = self.tokens(x)
        q, k, v = (one(x).view(*x.shape[:2], -1, self.head).transpose(1, 2) for one in (self.q, self.k, self.v))
        found = (q @ k.transpose(-1, -2) / self.head**0.5).softmax(-1) @ v
        return self.classes((x + self.out(found.transpose(1, 2).reshape(*x.shape[:2], -1))).mean(1))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 20)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.encoder(self.tokens(x), mask=mask, is_causal=True))


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM, *, batch_first=True, **more):
        super().__init__()
        self.tokens = nn.Embedding(20, 8)
        self.recurrent = kind(8, 16, batch_first=batch_first, **more)
        width = more.get("proj_size", 16) * (1 + more.get("bidirectional", False))
        self.head = nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 3))
        self.batch_first = batch_first

    def forward(self, x):
        x = self.tokens(x)
        return self.head(self.recurrent(x)[0][:, -1] if self.batch_first else self.recurrent(x.transpose(0, 1))[0][-1])


def dense(*sizes):
    layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def randomise_norms(model):
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.uniform_(-1, 1)
                module.running_var.uniform_(0.5, 2)
                module.weight.uniform_(0.5, 2)
    return model.eval()
