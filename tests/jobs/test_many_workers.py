"""Many workers give the bits of one, however many they are."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.jobs import run_executor
from shoal.spec.load import make_job
from tests.conftest import CNN, MLP, long_only
from tests.jobs.fault_injection import JOBS, assert_nothing_left, assert_same, reference_receipt

pytestmark = pytest.mark.usefixtures("limited_time")


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("workers", [2, *long_only(3, 4), 5, 8])
def test_any_number_of_workers_gives_the_same_bits(name, workers, run):
    outcome = run(JOBS[name], workers=workers, lanes=8)
    assert_same(outcome, reference_receipt(run, JOBS[name], lanes=8))
    assert outcome.receipt.workers == workers
    assert_nothing_left(outcome)


@pytest.mark.parametrize("lanes", [3, *long_only(5), 7])
def test_lanes_that_are_no_power_of_two(lanes, run):
    assert_same(run(JOBS["cnn"], workers=3, lanes=lanes), reference_receipt(run, JOBS["cnn"], lanes=lanes))


def test_half_precision(run):
    job = MLP | {"precision": "bf16", "steps": 6, "lanes": 4}
    assert_same(run(job, workers=3), reference_receipt(run, job))


def test_short_last_batches_and_several_epochs(run):
    """1438 samples in batches of 400: the last has 238, and some of its 7 lanes fewer than others."""
    job = {k: v for k, v in CNN.items() if k not in ("steps", "evaluate")}
    job |= {"epochs": 3, "batch_size": 400, "lanes": 7}
    outcome = run(job, workers=4)
    assert_same(outcome, reference_receipt(run, job))
    assert outcome.receipt.samples_seen == 3 * 1438


def test_workers_without_samples(run):
    """The last batch of 1438 samples has 2, for 8 lanes."""
    job = MLP | {"batch_size": 359, "lanes": 8, "steps": 10}
    assert_same(run(job, workers=8), reference_receipt(run, job))


def test_a_loss_with_a_divisor_of_its_own(run):
    job = {k: v for k, v in MLP.items() if k not in ("model", "loss", "metrics")}
    job |= {"task": "models.py:TokenTask", "lanes": 5, "steps": 20}
    assert_same(run(job, workers=3), reference_receipt(run, job))


@pytest.mark.parametrize("sync", ["lanes", *long_only({"kind": "server", "servers": 2})])
def test_classes_with_weights_and_one_that_is_ignored(run, sync):
    weight = [1.0, 5.0, 0.2, 1.0, 1.0, 3.0, 1.0, 1.0, 0.5, 2.0]
    loss = {"name": "CrossEntropyLoss", "args": {"weight": weight, "ignore_index": 3}}
    job = MLP | {"loss": loss, "lanes": 5, "steps": 20}
    assert_same(run(job, workers=3, sync=sync), reference_receipt(run, job))


@pytest.mark.parametrize(
    "changes",
    [
        {"workers": 1},
        {"workers": 2},
        {"workers": 2, "sync": {"kind": "server", "servers": 1, "backups": 0}},
        *long_only({"workers": 1, "codec": "int8"}, {"workers": 2, "codec": "int8"}, {"workers": 2, "sync": "ddp"}),
    ],
)
def test_lanes_with_losses_of_different_kinds_end_the_run(run, changes):
    """A batch of 25 samples gives one of two lanes 13."""
    job = {k: v for k, v in MLP.items() if k not in ("model", "loss", "metrics")}
    outcome = run(job | {"task": "models.py:MixedTask", "lanes": 2, "batch_size": 25, "steps": 5}, **changes)
    assert outcome.error.code == "SH422"


def test_folds_side_by_side_with_two_workers_each(run):
    def folds(parallel):
        split = {"kind": "stratified", "folds": 3, "parallel": parallel}
        return JOBS["mlp"] | {"lanes": 4, "data": MLP["data"] | {"split": split}}

    alone = [one.receipt.weights_sha256 for one in run(folds(1)).folds]
    assert [one.receipt.weights_sha256 for one in run(folds(3), workers=2).folds] == alone


@pytest.mark.long
def test_two_runs_side_by_side(run, job_dir):
    job = JOBS["mlp"] | {"lanes": 4, "steps": 200}
    other = make_job(job | {"workers": 2}, base_dir=str(job_dir))
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(run_executor.run, other, runs=job_dir / "beside")
        outcome = run(job, workers=2)
        assert_same(outcome, reference_receipt(run, job))
        assert_same(beside.result(), reference_receipt(run, job))
