"""Scores per sample, and what is told when the data or a library cannot do what is asked."""

import importlib.util
import json
import math

import pytest
import torch
from torch import nn

from shoal.compression.optional import load_library
from shoal.errors import ShoalError
from shoal.spec.compression.measured import ModelFile
from shoal.spec.load import load_run_job, make_job
from shoal.train.compression import actions
from shoal.train.compression.quality import judge, sample_scores
from shoal.train.compression.subject import Subject, save_weights
from tests.conftest import MLP


@pytest.fixture
def subject(job_dir):
    def make(**changes):
        return Subject(make_job(MLP | {"best": {"metric": "accuracy"}} | changes, base_dir=str(job_dir)))

    return make


def file_of(subject, path, change=None):
    state = subject.task().model().state_dict()
    if change:
        change(state)
    return ModelFile(path=save_weights(state, path).path)


def test_the_scores_of_the_parent_are_computed_once(subject, tmp_path):
    one = subject()
    parent = file_of(one, tmp_path / "parent.safetensors")
    other = file_of(one, tmp_path / "other.safetensors", lambda state: [v.neg_() for v in state.values()])
    known = tmp_path / "known.json"
    first = judge(one, parent, {"other": other}, part="validation", known=known)
    kept = json.loads(known.read_text())
    assert kept == sample_scores(one, parent, one.part("validation"))
    known.write_text("[1.0, 0")  # cut off
    assert judge(one, parent, {"other": other}, part="validation", known=known) == first
    assert json.loads(known.read_text()) == kept
    (itself,) = judge(one, parent, {"itself": parent}, part="validation", known=known)
    assert (itself.drop, itself.changed) == (0, 0)


OWN = {"model": None, "loss": None, "metrics": [], "best": {"metric": "loss"}}


@pytest.mark.parametrize("task", ["OwnInputs", "TwoCalls", "OwnMethod"])
def test_a_task_of_its_own_is_judged_by_what_it_computes(subject, tmp_path, task):
    """Whatever it does with the model: the mean over samples is the loss of the whole part."""
    one = subject(**OWN, task=f"compressible.py:{task}")
    parent = file_of(one, tmp_path / "parent.safetensors")
    part = one.part("validation")
    (row,) = judge(one, parent, {"parent": parent}, part="validation", known=tmp_path / "known.json")
    with torch.no_grad():
        whole = one.task().loss(one.model(parent), part.source.take(part.ids))
    assert row.parent == pytest.approx(whole.item(), rel=1e-5)


@pytest.mark.long
def test_the_judged_parent_of_a_task_of_its_own_has_the_metric_of_its_run(run, tmp_path):
    parent = run(MLP | OWN | {"task": "compressible.py:OwnInputs", "steps": 4})
    one = Subject(load_run_job(parent.paths.job))
    file = ModelFile(path=str(parent.paths.model / "model.safetensors"))
    (row,) = judge(one, file, {"parent": file}, part="validation", known=tmp_path / "known.json")
    assert row.parent == pytest.approx(parent.receipt.metrics["loss"], rel=1e-5)


def test_a_loss_that_depends_on_other_samples_is_refused(subject, tmp_path):
    one = subject(**OWN, task="compressible.py:OtherSamples")
    parent = file_of(one, tmp_path / "parent.safetensors")
    with pytest.raises(ShoalError, match=r"in batches, and .* if each sample is evaluated by itself") as refused:
        judge(one, parent, {"parent": parent}, part="validation", known=tmp_path / "known.json")
    assert (refused.value.code, refused.value.where) == ("SH665", "best.metric")
    assert not (tmp_path / "known.json").exists()


@pytest.mark.parametrize("task", ["OwnInputs", "TwoCalls", "OwnMethod"])
@pytest.mark.parametrize("claim", ["proven", "data"])
def test_nothing_is_proven_for_a_model_that_gets_other_inputs(subject, tmp_path, task, claim):
    """Half of the neurons are dead for the inputs of the batch. What the model gets is not known."""
    one = subject(**OWN, task=f"compressible.py:{task}")
    file = file_of(one, tmp_path / "parent.safetensors").model_dump(mode="json")
    with pytest.raises(ShoalError, match="does not give the model the inputs of the batch") as refused:
        actions.lossless(one, file=file, out=str(tmp_path / "out.safetensors"), claim=claim, box="range")
    assert refused.value.code == "SH662"


def test_five_losses_are_too_few(subject, tmp_path):
    one = subject(best={"metric": "loss"}, data=MLP["data"] | {"split": {"kind": "holdout", "validation": 0.003}})
    parent = file_of(one, tmp_path / "parent.safetensors")
    (row,) = judge(one, parent, {"parent": parent}, part="validation", known=tmp_path / "known.json")
    assert (row.samples, row.drop, row.drop_bound, row.smallest_bound) == (5, 0.0, math.inf, math.inf)


class Several(nn.Linear):
    def forward(self, x):
        return super().forward(x), {"twice": 2 * super().forward(x)}


def test_all_outputs_are_compared_and_no_number_is_a_difference():
    torch.manual_seed(0)
    one, other, x = Several(4, 3).requires_grad_(False), Several(4, 3).requires_grad_(False), torch.rand(5, 4)
    wanted = [2 * value.abs().max().item() for value in (one(x)[0] - other(x)[0], one(x)[0])]
    assert actions._difference(one, other, x) == pytest.approx(tuple(wanted))
    other.weight[0, 0] = torch.nan
    assert math.isnan(actions._difference(one, other, x)[0])
    assert math.isnan(actions._largest([0.0, math.nan, 1.0]))


def test_a_metric_that_is_no_mean_over_samples_is_refused(subject, tmp_path):
    one = subject(metrics=["kappa"], best={"metric": "kappa"})
    with pytest.raises(ShoalError, match="mean over samples") as refused:
        sample_scores(one, file_of(one, tmp_path / "parent.safetensors"), one.part("validation"))
    assert refused.value.code == "SH665"


def test_a_loss_that_is_no_number_is_told(subject, tmp_path):
    """It says nothing about the metric: the model of a rung may be at fault."""
    one = subject(best={"metric": "loss"})
    broken = file_of(one, tmp_path / "broken.safetensors", lambda state: [v.fill_(torch.nan) for v in state.values()])
    with pytest.raises(ShoalError, match="'loss' over all samples is nan") as refused:
        sample_scores(one, broken, one.part("validation"))
    assert refused.value.code == "SH403"


def test_without_samples_nothing_is_calibrated_and_no_channel_is_chosen(subject, tmp_path):
    one = subject()
    file = file_of(one, tmp_path / "parent.safetensors").model_dump(mode="json")
    with pytest.raises(ShoalError, match="no samples to calibrate with") as refused:
        actions.int8(one, file=file, path="", out="", ranges={})
    assert (refused.value.code, refused.value.where) == ("SH662", "int8")
    if importlib.util.find_spec("torch_pruning"):
        with pytest.raises(ShoalError, match="no samples to measure importance with") as refused:
            actions.prune(one, file=file, out="", remove=0.5, importance="taylor", parts=[])
        assert (refused.value.code, refused.value.where) == ("SH662", "prune")


def test_a_part_that_the_job_does_not_have_is_told(subject):
    with pytest.raises(ShoalError, match="no test part") as refused:
        subject(data=MLP["data"] | {"split": {"kind": "holdout", "validation": 0.2}}).part("test")
    assert refused.value.code == "SH665"


def test_a_library_that_is_missing_is_named():
    with pytest.raises(ShoalError, match="no_such_runtime cannot be imported") as refused:
        load_library("no_such_runtime")
    assert refused.value.code == "SH664"
    assert "shoal[compress]" in refused.value.fix
