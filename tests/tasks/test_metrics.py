"""Metrics over lanes are those of the whole split, whatever the lanes."""

from itertools import pairwise

import pytest
import torch
import torchmetrics
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.checkpoint.state_format import pack_state, unpack_state
from shoal.data.batch import Batch
from shoal.errors import ShoalError
from shoal.spec.base import Ref
from shoal.tasks.metrics import (
    MetricAccumulator,
    are_logits,
    build_metrics,
    disable_distributed_sync,
    merge_lanes,
    to_probabilities,
)

CLASSES = 4


def refs(*names):
    return [Ref(name=name) for name in names]


def build(*names, example=None):
    return build_metrics(refs(*names), example, base_dir=".")


def samples(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, CLASSES, generator=generator), torch.randint(0, CLASSES, (count,), generator=generator)


def accumulate(metrics, output, target, *, logits=True, loss=1.0):
    lane = MetricAccumulator(metrics, logits=logits)
    if len(target):
        lane.update(torch.tensor(loss), output, Batch((), target, len(target)))
    return lane


class Wrapper(torchmetrics.Metric):
    """A metric that wraps another, and answers with a dictionary."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def update(self, prediction, target):
        self.inner.update(prediction, target)

    def compute(self):
        return self.inner.compute()


class Smallest(torchmetrics.Metric):
    """The smallest prediction. Its state before the first sample, 0, is no prediction."""

    def __init__(self):
        super().__init__()
        self.add_state("value", torch.tensor(0.0), dist_reduce_fx="min")

    def update(self, prediction, target):
        smallest = prediction.min()
        self.value = torch.minimum(self.value, smallest) if self._update_count > 1 else smallest

    def compute(self):
        return self.value


# ---- building ----


@pytest.mark.parametrize(
    ("output", "target", "kind"),
    [
        (torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2]), "Multiclass"),
        (torch.randn(6), torch.tensor([0, 1, 0, 1, 0, 1]), "Binary"),
        (torch.randn(6, 1), torch.tensor([0, 1, 0, 1, 0, 1]), "Binary"),
        (torch.randn(6, 5, 9), torch.randint(0, 9, (6, 5)), "Multiclass"),
    ],
)
def test_a_short_name_gets_its_kind_from_the_example(output, target, kind):
    built = build("accuracy", "f1", "auc", example=(output, target))
    assert [type(metric).__name__ for metric in built.values()] == [
        f"{kind}{n}" for n in ("Accuracy", "F1Score", "AUROC")
    ]
    if kind == "Multiclass":
        assert built["accuracy"].num_classes == {2: 3, 3: 9}[output.dim()]


def test_the_users_arguments_win_over_the_example():
    for args in ({"num_classes": 7}, {"task": "multiclass", "num_classes": 7}):
        ref = Ref(name="accuracy", args=args)
        built = build_metrics([ref], (torch.randn(6, 3), torch.zeros(6, dtype=torch.int64)), base_dir=".")
        assert built["accuracy"].num_classes == 7
    ref = Ref(name="accuracy", args={"average": "macro"})
    built = build_metrics([ref], (torch.randn(6, 3), torch.zeros(6, dtype=torch.int64)), base_dir=".")
    assert (built["accuracy"].average, built["accuracy"].num_classes) == ("macro", 3)


def test_repeated_metrics_have_names_of_their_own():
    assert list(build("mse", "mae", "mse")) == ["mse", "mae", "mse_2"]
    assert build("rmse")["rmse"].squared is False


@pytest.mark.parametrize(("name", "code"), [("NoSuchMetric", "SH202"), ("accuracy", "SH205")])
def test_a_metric_that_cannot_be_built_is_named_by_its_field(name, code):
    with pytest.raises(ShoalError) as caught:
        build("mse", name)
    assert caught.value.code == code
    assert caught.value.where.startswith("metrics.1")


# ---- logits ----


@pytest.mark.parametrize(
    ("prediction", "known", "logits"),
    [
        (torch.tensor([0.0, 0.5, 1.0]), None, False),
        (torch.tensor([0.0, 0.5, 1.01]), None, True),
        (torch.tensor([-0.01, 0.5]), None, True),
        (torch.tensor([0.0, 0.5]), True, True),
        (torch.tensor([-3.0, 5.0]), False, False),
        (torch.tensor([-3, 5]), None, False),
        ({"boxes": torch.tensor([-3.0])}, None, False),
    ],
)
def test_what_counts_as_logits(prediction, known, logits):
    assert are_logits(prediction, known) is logits


def test_probabilities_follow_the_shape_of_the_target():
    output, target = samples(5)
    assert torch.equal(to_probabilities(output, target), output.double().softmax(1))
    assert torch.equal(to_probabilities(output, output > 0), output.double().sigmoid())
    assert torch.equal(to_probabilities(output[:, 0], None), output[:, 0].double().sigmoid())


def test_large_logits_keep_their_order():
    probabilities = to_probabilities(torch.tensor([20.0, 21.0, 22.0]), torch.tensor([0, 1, 1]))
    assert probabilities.dtype == torch.float64
    assert probabilities[0] < probabilities[1] < probabilities[2] < 1


def test_metrics_of_classes_see_probabilities_and_others_the_output():
    target = torch.tensor([0, 1, 1, 0])
    output = torch.tensor([0.2, 0.3, 0.9, 0.4])  # as logits, all of them mean class 1
    built = build("accuracy", "mse", example=(output, target))
    values = {logits: merge_lanes([accumulate(built, output, target, logits=logits)]) for logits in (True, False)}
    assert values[True]["accuracy"] == 0.5
    assert values[False]["accuracy"] == 0.75
    assert values[True]["mse"] == values[False]["mse"] == pytest.approx(((output - target) ** 2).mean().item())


# ---- accumulating and merging ----


@settings(max_examples=25)
@given(cuts=st.lists(st.integers(0, 24), max_size=4).map(sorted), seed=st.integers(0, 99))
def test_lanes_together_give_the_metrics_of_the_whole(cuts, seed):
    output, target = samples(24, seed)
    built = build("accuracy", "f1", "auc", "confusion", example=(output, target))
    bounds = [0, *cuts, 24]
    lanes = [accumulate(built, output[a:b], target[a:b]) for a, b in pairwise(bounds)]
    assert merge_lanes(lanes) == pytest.approx(merge_lanes([accumulate(built, output, target)]), rel=1e-6)


def test_the_loss_is_weighted_by_samples_or_by_the_tasks_own_count():
    one, other = MetricAccumulator({}, logits=False), MetricAccumulator({}, logits=False)
    one.update(torch.tensor(1.0), None, Batch((), None, 3))
    other.update(torch.tensor(5.0), None, Batch((), None, 1))
    assert merge_lanes([one, other]) == {"loss": 2.0}
    other.update((torch.tensor(10.0), torch.tensor(4)), None, Batch((), None, 99))
    assert merge_lanes([one, other]) == {"loss": (3 + 5 + 10) / (3 + 1 + 4)}


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_a_lane_without_samples_does_not_count(empty):
    metrics = {"correlation": torchmetrics.PearsonCorrCoef(), "smallest": Smallest()}
    output, target = torch.tensor([3.0, 1.0, 4.0, 1.5]), torch.tensor([2.0, 7.0, 1.0, 8.0])
    lanes = [accumulate(metrics, output[part], target[part], logits=False) for part in (slice(0, 2), slice(2, 4))]
    alone = merge_lanes([accumulate(metrics, output, target, logits=False)])
    lanes.insert(empty, MetricAccumulator(metrics, logits=False))
    assert merge_lanes(lanes) == pytest.approx(alone)


def test_lanes_do_not_share_their_metrics():
    output, target = samples(8)
    built = build("accuracy", example=(output, target))
    accumulate(built, output, target)
    assert not built["accuracy"].update_called


@pytest.mark.parametrize("names", [("accuracy", "auc", "mse"), ("mse", "correlation")])
def test_the_state_of_a_lane_travels_to_another_process(names):
    output, target = torch.randn(12, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1] * 6)
    known = {
        "accuracy": torchmetrics.classification.BinaryAccuracy(),
        "auc": torchmetrics.classification.BinaryAUROC(),
        "mse": torchmetrics.MeanSquaredError(),
        "correlation": torchmetrics.PearsonCorrCoef(),
    }
    metrics = {name: known[name] for name in names}
    target = target.float() if "correlation" in names else target
    lanes = [accumulate(metrics, output[part], target[part]) for part in (slice(0, 5), slice(5, 12))]
    template = MetricAccumulator(metrics, logits=True)
    received = [template.with_state(unpack_state(pack_state(lane.state()))) for lane in lanes]
    assert merge_lanes(received) == merge_lanes(lanes)


def test_a_metric_of_several_values_gives_one_number_for_each():
    output, target = samples(40)
    values = merge_lanes([accumulate(build("confusion", example=(output, target)), output, target)])
    assert set(values) == {"loss", *(f"confusion/{i}" for i in range(CLASSES * CLASSES))}
    assert sum(values.values()) - values["loss"] == 40


def test_a_metric_that_gives_a_dictionary_gives_one_number_for_each_key():
    inner = torchmetrics.MetricCollection(
        {"mse": torchmetrics.MeanSquaredError(), "mae": torchmetrics.MeanAbsoluteError()}
    )
    metrics = {"errors": Wrapper(inner)}
    lanes = [accumulate(metrics, torch.tensor([x]), torch.tensor([4.0]), logits=False) for x in (4.0, 2.0)]
    assert merge_lanes(lanes) == {"loss": 1.0, "errors/mse": 2.0, "errors/mae": 1.0}


def test_a_metric_that_fails_is_named():
    output, target = samples(4)
    lane = MetricAccumulator(build("accuracy", example=(output, target)), logits=True)
    with pytest.raises(ShoalError, match="accuracy: ") as caught:
        lane.update(torch.tensor(1.0), output, Batch((), target[:3], 4))
    assert (caught.value.code, caught.value.where) == ("SH408", "metrics")


def test_every_part_of_a_metric_stays_in_its_process():
    metric = Wrapper(torchmetrics.MeanSquaredError())
    assert disable_distributed_sync(metric) is metric
    assert [part.distributed_available_fn() for part in (metric, metric.inner)] == [False, False]
