"""Evaluation is a function of the weights and the data alone."""

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn

from shoal import Batch, Task
from shoal.checkpoint.state_format import pack_state
from shoal.collectives.outcome import Discarded
from shoal.data.datasets import DatasetSplit
from shoal.errors import ShoalError
from shoal.lanes.replica import Replica
from shoal.net.errors import LinkError
from shoal.tasks.evaluation import Evaluator, merge_results
from shoal.tasks.metrics import MetricAccumulator


class FourSampleSource:
    """Four samples in memory: outputs are the inputs times the weight, plus the bias."""

    in_memory, per_sample, is_sequential = True, False, False

    def take(self, ids):
        return Batch((torch.tensor([[0.2], [0.4], [0.6], [0.8]])[ids],), torch.tensor([0, 0, 1, 1])[ids], len(ids))


class UnspecifiedLogitsTask(Task):
    """Does not say whether its predictions are logits."""

    def loss(self, model, batch):
        return self.predict(model, batch).mean()

    def predict(self, model, batch):
        return model(*batch.inputs).squeeze(-1)

    def metrics(self, example=None):
        return {"accuracy": torchmetrics.classification.BinaryAccuracy()}


def replica(weight, bias=0.0):
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, weight)
    nn.init.constant_(model.bias, bias)
    return Replica(model, torch.optim.SGD(model.parameters(), 0.1), UnspecifiedLogitsTask().loss, seed=0)


def test_what_was_measured_before_changes_nothing():
    part = DatasetSplit("validation", FourSampleSource(), np.arange(4), None)
    used, fresh = (Evaluator(UnspecifiedLogitsTask(), lanes=2, chunk_size=4, seed=0) for _ in range(2))
    used.evaluate(replica(-2.0), part)  # these look like logits, the next like probabilities
    assert used.evaluate(replica(1.0), part) == fresh.evaluate(replica(1.0), part)


class LossAlone(Task):
    """Its model is a box of parts."""

    def loss(self, model, batch):
        return model["part"](*batch.inputs).mean()


def test_a_task_without_metrics_is_evaluated_by_its_loss_alone():
    model = nn.ModuleDict({"part": nn.Linear(1, 1)})
    made = Replica(model, torch.optim.SGD(model.parameters(), 0.1), LossAlone().loss, seed=0)
    part = DatasetSplit("validation", FourSampleSource(), np.arange(4), None)
    found = Evaluator(LossAlone(), lanes=2, chunk_size=4, seed=0).evaluate(made, part)
    assert found["loss"] == pytest.approx(model["part"](torch.tensor([[0.5]])).item())


# ---- lanes and workers ----


def split(samples=4):
    return DatasetSplit("validation", FourSampleSource(), np.arange(samples), None)


def evaluator(task=None, *, lanes=2, chunk_size=1):
    return Evaluator(task or UnspecifiedLogitsTask(), lanes=lanes, chunk_size=chunk_size, seed=0)


@pytest.mark.parametrize(
    ("lanes", "chunk_size", "samples", "chunks"),
    [
        (2, 1, 4, [[0, 2], [1, 3]]),
        (2, 3, 4, [[0], [1]]),
        (3, 2, 4, [[0], [1], []]),
        (2, 4, 4, [[0], []]),
        (1, 1, 3, [[0, 1, 2]]),
    ],
)
def test_chunks_belong_to_lanes_in_turn(lanes, chunk_size, samples, chunks):
    it = evaluator(lanes=lanes, chunk_size=chunk_size)
    assert [it.chunks_of(split(samples), [lane]) for lane in range(lanes)] == chunks


def distributed(shares, *, weight=1.0, bias=0.0, lanes=4, stops_after=None):
    """Each worker evaluates its share of the lanes; the last one gathers."""
    sent, found, seen = {}, None, []
    for worker, share in enumerate(shares):

        def gather(content, worker=worker):
            sent[worker] = content
            return dict(sent) if len(sent) == len(shares) else Discarded("the others have not sent theirs")

        found = evaluator(lanes=lanes).evaluate_distributed(
            replica(weight, bias),
            split(),
            lanes=share,
            gather=gather,
            is_aborted=lambda: stops_after is not None and len(seen) >= stops_after,
            on_chunk=lambda: seen.append(1),
        )
    return found, len(seen)


@pytest.mark.parametrize(
    ("weight", "bias"),
    [(1.0, 0.0), (-2.0, 0.0), (1.0, -0.3)],
    ids=["probabilities", "logits", "only chunk 0 looks like logits"],
)
@pytest.mark.parametrize(
    "shares", [[[0, 1, 2, 3]], [[0], [1, 2, 3]], [[3, 1], [2, 0]], [[], [0, 1, 2, 3]], [[0, 1, 2, 3], []]], ids=str
)
def test_workers_together_find_what_one_finds_alone(shares, weight, bias):
    alone = evaluator(lanes=4).evaluate(replica(weight, bias), split())
    assert distributed(shares, weight=weight, bias=bias) == (alone, 4)


def test_a_worker_that_is_asked_to_stop_discards_the_evaluation():
    found, chunks = distributed([[0, 1, 2, 3]], stops_after=2)
    assert isinstance(found, Discarded)
    assert (found.why, chunks) == ("asked to stop", 2)


def test_a_lost_peer_discards_the_evaluation():
    lost = Discarded("worker-1 is gone")
    found = evaluator().evaluate_distributed(
        replica(1.0),
        split(),
        lanes=[0, 1],
        gather=lambda content: lost,
        is_aborted=lambda: False,
        on_chunk=lambda: None,
    )
    assert found is lost


def test_the_last_chunk_counts_by_its_samples():
    values = evaluator(chunk_size=3).evaluate(replica(1.0), split())
    assert values == pytest.approx({"loss": 0.5, "accuracy": 1.0})


class DrawingTask(UnspecifiedLogitsTask):
    """Its loss is a random number."""

    logits = False

    def loss(self, model, batch):
        return torch.rand(())


def test_random_numbers_of_a_chunk_do_not_depend_on_lanes():
    torch.manual_seed(1)
    one = evaluator(DrawingTask(), lanes=1).evaluate(replica(1.0), split())
    torch.manual_seed(2)
    assert evaluator(DrawingTask(), lanes=4).evaluate(replica(1.0), split()) == pytest.approx(one, rel=1e-12)
    first = evaluator(DrawingTask(), lanes=1).evaluate(replica(1.0), split(1))
    assert first["loss"] != one["loss"], "each chunk has its own"


class FailingTask(UnspecifiedLogitsTask):
    def predict(self, model, batch):
        raise ValueError("no such word")


def test_a_task_that_fails_is_reported_with_split_and_chunk():
    with pytest.raises(ShoalError, match="evaluation of validation, chunk 0: ValueError: no such word") as caught:
        evaluator(FailingTask()).evaluate(replica(1.0), split())
    assert caught.value.code == "SH401"
    assert caught.value.where.startswith(__file__)


# ---- results of other members that are none ----


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 40,
        pack_state([1, 2]),
        pack_state({"zero": {}}),
        pack_state({0: {}}),
        pack_state({0: {"loss": 1.0, "count": 1.0, "metrics": {}}}),
        pack_state({0: {"loss": torch.zeros(2).double(), "count": torch.zeros(()).double(), "metrics": {}}}),
        pack_state({0: {"loss": torch.zeros(()), "count": torch.zeros(()), "metrics": {"accuracy": [{"updates": 1}]}}}),
    ],
)
def test_a_member_that_sends_no_result_discards_the_evaluation(content):
    own = MetricAccumulator({}, logits=False)
    with pytest.raises(LinkError):
        merge_results({0: pack_state({1: own.state()}), 1: content}, own)


def test_states_of_other_members_become_no_other_attributes():
    metric = torchmetrics.classification.MulticlassAccuracy(num_classes=3)
    own = MetricAccumulator({"accuracy": metric}, logits=False)
    state = own.state()
    state["metrics"]["accuracy"][0]["states"]["compute"] = torch.zeros(())
    with pytest.raises(LinkError, match="other states"):
        own.with_state(state)
