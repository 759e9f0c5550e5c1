"""What a plain task makes of outputs and targets, and what metrics are given."""

import math

import pytest
import torch
from torch import nn

from shoal.data.batch import Batch
from shoal.errors import ShoalError
from shoal.spec.base import Ref
from shoal.tasks.metrics import MetricAccumulator, build_metrics, merge_lanes
from shoal.tasks.task import align_shapes


@pytest.mark.parametrize("classes_last", [True, False])
def test_perplexity_takes_either_order(classes_last):
    torch.manual_seed(0)
    output, target = torch.randn(6, 5, 9), torch.randint(0, 9, (6, 5))
    loss = nn.functional.cross_entropy(output.movedim(-1, 1), target)
    given = output if classes_last else output.movedim(-1, 1)
    names = [Ref(name="perplexity"), Ref(name="accuracy")]
    lanes = [MetricAccumulator(build_metrics(names, (given, target), base_dir="."), logits=True) for _ in range(2)]
    for lane, part in zip(lanes, (slice(0, 4), slice(4, 6)), strict=True):
        lane.update(loss, given[part], Batch((), target[part], len(target[part])))
    values = merge_lanes(lanes)
    assert values["perplexity"] == pytest.approx(math.exp(loss))
    assert values["accuracy"] == pytest.approx((output.argmax(-1) == target).float().mean().item())


def test_as_many_classes_as_places_is_not_guessed():
    with pytest.raises(ShoalError, match="which of the two 7 counts classes"):
        align_shapes(torch.randn(3, 7, 7), torch.randint(0, 7, (3, 7)))


def test_a_square_batch_is_no_riddle():
    output, target = torch.randn(5, 5), torch.randint(0, 5, (5,))
    assert align_shapes(output, target)[0] is output
