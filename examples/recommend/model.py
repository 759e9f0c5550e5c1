"""Made-up clicks, and a model with a tower for users and one for items."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


def clicks(users, items, count, seed, tastes=4):
    """`count` pairs of a user and an item; the better their hidden tastes match, the likelier is a click."""
    chance = torch.Generator().manual_seed(seed)
    user_taste = torch.randn(users, tastes, generator=chance)
    item_taste = torch.randn(items, tastes, generator=chance)
    popularity = torch.randn(items, generator=chance)
    pairs = torch.randperm(users * items, generator=chance)[:count]  # no pair stands twice
    user, item = pairs // items, pairs % items
    match = (user_taste[user] * item_taste[item]).sum(1) + popularity[item] - 1.0
    clicked = torch.rand(count, generator=chance) < torch.sigmoid(2 * match)
    return TensorDataset(user, item, clicked.long())


class TwoTowers(nn.Module):
    """Users and items become points; a user clicks on what points the same way."""

    def __init__(self, users, items, width):
        super().__init__()
        self.user, self.item = nn.Embedding(users, width), nn.Embedding(items, width)
        self.user_offset, self.item_offset = nn.Embedding(users, 1), nn.Embedding(items, 1)
        for table in (self.user, self.item, self.user_offset, self.item_offset):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, user, item):
        match = (self.user(user) * self.item(item)).sum(1)
        return match + self.user_offset(user).squeeze(1) + self.item_offset(item).squeeze(1)
