"""Scores per sample, and what is told when the data or a library cannot do what is asked."""

import importlib.util
import json

import pytest
import torch

from shoal.compression.optional import load_library
from shoal.errors import ShoalError
from shoal.spec.compression.measured import ModelFile
from shoal.spec.load import make_job
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
