import pytest
import torch
from torch import nn

from shoal.train.shape import _count


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_kept_for_the_backward_pass_is_counted_once_and_without_weights(device):
    net = nn.Sequential(nn.Linear(4, 1000), nn.ReLU(), nn.Linear(1000, 2)).to(device)
    flops, kept_bytes = _count(net, lambda: net(torch.ones(8, 4, device=device)).sum().backward())
    assert kept_bytes == 4 * (8 * 4 + 8 * 1000)
    assert flops == 2 * 8 * (2 * 4 * 1000 + 3 * 1000 * 2)
