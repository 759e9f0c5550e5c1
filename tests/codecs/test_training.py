"""Models train through codecs: contributors send what they have, and what is lost comes later."""

import pytest
import torch

from shoal.codecs.make import make_codec
from shoal.codecs.residual import Residual
from tests.codecs.codec_cases import BF16, DGC, FP16, INT8, LOWRANK, NONE, SIGN, codec_id, encoded

CONTRIBUTORS, INPUTS, OUTPUTS = 3, 30, 20


def trained(kind, *, remember=True, steps=400):
    """How far linear regression by gradient descent is from the weights that made the data."""
    draws = torch.Generator().manual_seed(0)
    truth = torch.randn(INPUTS, OUTPUTS, generator=draws)
    data = torch.randn(CONTRIBUTORS, 64, INPUTS, generator=draws)
    weights = torch.zeros(INPUTS, OUTPUTS)
    codec = make_codec(kind, shapes=[weights.shape])
    memories = [Residual(codec.residual_floats(weights.numel())) for _ in range(CONTRIBUTORS)]
    rate = 0.02 if kind == DGC else 0.1
    for _ in range(steps):
        total = torch.zeros(weights.numel())
        for inputs, memory in zip(data, memories, strict=True):
            gradient = inputs.T @ (inputs @ (weights - truth)) / len(inputs)
            before, after = memory.before_and_after() if remember else (None, None)
            codec.decode(encoded(codec, gradient.view(-1), residual_in=before, residual_out=after), total, add=True)
            if remember:
                memory.commit()
        weights -= rate / CONTRIBUTORS * total.view_as(weights)
    return ((weights - truth).norm() / truth.norm()).item()


FEW = {"kind": "topk", "keep": 0.1}


@pytest.mark.parametrize("kind", [NONE, BF16, FP16, INT8, SIGN, FEW, DGC, LOWRANK], ids=codec_id)
def test_it_arrives(kind):
    assert trained(kind) < 0.02


@pytest.mark.parametrize("kind", [SIGN, FEW, LOWRANK], ids=codec_id)
def test_what_was_lost_matters(kind):
    assert trained(kind) < 0.1 * trained(kind, remember=False)
