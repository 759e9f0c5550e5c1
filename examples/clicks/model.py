"""Made-up clicks with hashed features, and a factorisation machine whose rows live on servers."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from shoal import SparseTable


def clicks(rows, users, items, count, seed, tastes=2):
    """`count` visits: who, what, and where (a site). Their numbers are hashed to rows of one large table, as one does
    with features that nobody can list. Some users click more than others, some items are popular, and the better the
    hidden tastes of the two match, the likelier is a click."""
    chance = torch.Generator().manual_seed(seed)
    user_taste = torch.randn(users, tastes, generator=chance)
    item_taste = torch.randn(items, tastes, generator=chance)
    eager, popular, mood = (torch.randn(size, generator=chance) for size in (users, items, 100))
    user = (torch.rand(count, generator=chance) ** 2 * users).long()  # some come often, most do not
    item = (torch.rand(count, generator=chance) ** 2 * items).long()
    site = torch.randint(0, 100, (count,), generator=chance)
    match = (user_taste[user] * item_taste[item]).sum(1) + eager[user] + popular[item] + mood[site] - 1.0
    clicked = torch.rand(count, generator=chance) < torch.sigmoid(1.5 * match)
    features = torch.stack([hashed(0, user, rows), hashed(1, item, rows), hashed(2, site, rows)], 1)
    return TensorDataset(features, clicked.long())


def hashed(field, value, rows):
    """A row for the value of a field; two may share one, but seldom do."""
    word = (field * 1_000_003 + value + 1) * 0x1E3779B97F4A7C15
    return (word ^ (word >> 29)) * 0x5851F42D4C957F2D % rows


class FactorisationMachine(nn.Module):
    """Each feature has a weight and a vector; vectors of the features that meet are multiplied with each other."""

    def __init__(self, rows, width):
        super().__init__()
        self.weights = SparseTable(rows, 1, optimizer="adagrad", lr=0.2, init=0.0)
        self.vectors = SparseTable(rows, width, optimizer="rowwise_adagrad", lr=0.05, init=0.1)
        self.offset = nn.Parameter(torch.zeros(()))

    def forward(self, features):
        vectors = self.vectors(features)
        pairs = (vectors.sum(1) ** 2 - (vectors**2).sum(1)).sum(1) / 2
        return self.offset + self.weights(features).sum((1, 2)) + pairs
