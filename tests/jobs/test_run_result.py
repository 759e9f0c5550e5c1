"""One result for runs with and without folds; which folds are started, and what they add up to."""

import json

import pytest

from shoal.errors import error
from shoal.events import RunState
from shoal.jobs.folds import FoldSchedule
from shoal.jobs.receipt import make_receipt
from shoal.jobs.run_result import RunResult
from shoal.spec.load import load_job, make_job
from shoal.spec.run_paths import RunPaths, write_atomically
from tests.conftest import MLP
from tests.jobs.test_receipt import FINISHED

FAILURE = error("SH603", "worker-0 ended by SIGKILL")


@pytest.fixture
def receipt(job_dir):
    def go(accuracy=0.5):
        state = RunState(result=FINISHED, metrics={"accuracy": accuracy})
        return make_receipt(make_job(MLP, base_dir=str(job_dir)), state, run="one")

    return go


@pytest.fixture
def paths(tmp_path):
    found = RunPaths(tmp_path / "runs" / "mlp-1")
    found.root.mkdir(parents=True)
    return found


def test_a_run_without_folds_decides_for_itself(paths, receipt):
    result = RunResult(paths, "finished", receipt=receipt(0.5))
    assert result.deciding is result
    assert (result.exit_code, result.run, result.folds) == (0, "mlp-1", ())
    assert result.metrics == {"accuracy": (0.5, 0.0)}
    assert result.receipt_data() == receipt(0.5).model_dump(mode="json")


def test_folds_that_finished(paths, receipt):
    folds = tuple(RunResult(paths.fold(n), "finished", receipt=receipt(0.5 + 0.1 * n)) for n in range(3))
    result = RunResult.of_folds(paths, folds)
    assert (result.status, result.error, result.receipt, result.exit_code) == ("finished", None, None, 0)
    assert result.deciding is folds[-1]
    assert result.children == result.folds == folds
    assert result.metrics["accuracy"] == pytest.approx((0.6, 0.1))
    data = result.receipt_data()
    assert (data["run"], len(data["folds"])) == ("mlp-1", 3)
    assert data["metrics"]["accuracy"] == pytest.approx({"mean": 0.6, "std": 0.1})


def test_the_first_fold_that_did_not_finish_decides(paths, receipt):
    done = RunResult(paths.fold(0), "finished", receipt=receipt())
    failed = RunResult(paths.fold(1), "failed", error=FAILURE)
    stopped = RunResult(paths.fold(2), "interrupted")
    result = RunResult.of_folds(paths, (done, failed, stopped))
    assert (result.status, result.error, result.deciding) == ("failed", FAILURE, failed)
    assert result.exit_code == FAILURE.exit_code


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"status": "finished"}, 0),
        ({"status": "interrupted"}, 130),
        ({"status": "terminated"}, 143),
        ({"status": "stopped"}, 143),
        ({"status": "pruned"}, 143),
        ({"status": "failed", "error": FAILURE}, FAILURE.exit_code),
        ({"status": "failed", "error": FAILURE, "traceback": "Traceback"}, 1),
    ],
)
def test_exit_codes(paths, fields, code):
    assert RunResult(paths, **fields).exit_code == code


# ---- which fold is next ----


@pytest.fixture
def schedule(paths, job_dir):
    def go(parallel=1):
        split = {"kind": "stratified", "folds": 3, "parallel": parallel}
        return FoldSchedule(make_job(MLP | {"data": MLP["data"] | {"split": split}}, base_dir=str(job_dir)), paths)

    return go


def test_folds_are_started_in_order_and_their_jobs_lie_in_their_directories(schedule, paths):
    made = schedule(parallel=2)
    assert [load_job(fold.job, check_names=False).data.split.fold for fold in paths.folds] == [0, 1, 2]
    (first, job), (second, _) = made.take_next(0), made.take_next(1)
    assert (first, second) == (paths.fold(0), paths.fold(1))
    assert job.fold_count == 1
    assert made.take_next(2) is None, "two at a time"
    assert made.take_next(1)[0] == paths.fold(2)
    assert made.take_next(0) is None, "there are three"


def test_after_a_failure_no_further_fold_is_started(schedule, paths):
    made = schedule()
    fold, _ = made.take_next(0)
    made.add(RunResult(fold, "failed", error=FAILURE))
    assert made.take_next(0) is None
    result = made.finish("")
    assert (result.status, len(result.children)) == ("failed", 1)
    assert not paths.receipt.exists()


def test_after_a_stop_the_waiting_folds_count_as_stopped(schedule, paths, receipt):
    made = schedule()
    fold, _ = made.take_next(0)
    made.add(RunResult(fold, "finished", receipt=receipt()))
    result = made.finish("pruned")
    assert [one.status for one in result.children] == ["finished", "pruned", "pruned"]
    assert not paths.receipt.exists()


def test_finished_folds_are_not_run_again(schedule, paths, receipt):
    schedule()
    for n in (0, 2):
        write_atomically(paths.fold(n).receipt, receipt(0.1 * n).model_dump_json())
    made = schedule(parallel=3)
    fold, _ = made.take_next(0)
    assert fold == paths.fold(1)
    assert made.take_next(1) is None
    made.add(RunResult(fold, "finished", receipt=receipt(0.1)))
    result = made.finish("")
    assert [one.receipt.metrics["accuracy"] for one in result.children] == [0.0, 0.1, 0.2]
    assert json.loads(paths.receipt.read_text()) == result.receipt_data()
