"""Answers about runs that are not one row for each step: grouped rows, folds, trials, searches, long histories."""

import pytest

from shoal.spec.receipt import FoldsReceipt, Receipt
from shoal.spec.run_paths import RunPaths
from shoal.storage import history
from tests.jobs.past_run import FINISHED, TOLD, told_events, write_run
from tests.web import past_work
from tests.web.test_api import append, get


def write_grouped(root, rows, weights):
    """A run whose rows of steps count several steps each: `rows` are pairs of step and loss."""
    steps = [("step", "worker-0", at, {"loss": loss, "steps": 7, "samples": 50, "wall_s": 0.01}) for at, loss in rows]
    ends = ("finished", "worker-0", 60, FINISHED | {"weights_sha256": weights})
    told = [row for row in TOLD if row[0] not in ("step", "finished")]
    return write_run(root, [*told[:4], *steps, ends, *told[4:]])


def write_folds(root, weights):
    """A job with folds: only they make steps."""
    paths = write_run(root, [row for row in TOLD if row[0] in ("run_started", "run_ended")])
    receipts = []
    for number, one in enumerate(weights):
        fold = write_run(paths.fold(number).root)
        receipt = Receipt.model_validate_json(fold.receipt.read_text())
        receipts.append(receipt.model_copy(update={"run": fold.name, "weights_sha256": one}))
    paths.receipt.write_text(FoldsReceipt(run=paths.name, folds=receipts, metrics={}).model_dump_json())
    return paths


@pytest.mark.parametrize(
    ("mine", "yours", "after", "at"),
    [
        ([(7, 2.0), (14, 1.0), (21, 0.5)], [(7, 2.0), (14, 1.0), (21, 0.6)], 14, 21),
        ([(7, 2.0), (14, 1.0), (30, 0.5)], [(7, 2.0), (16, 1.0), (30, 0.6)], 7, 30),
        ([(7, 2.0)], [(7, 2.1)], 0, 7),
        ([(7, 2.0), (14, 1.0)], [(8, 2.1), (15, 1.1)], None, None),
    ],
)
def test_losses_of_grouped_rows_part_in_a_range(served, mine, yours, after, at):
    write_grouped(served.runs / "rnn-1", mine, "11" * 32)
    write_grouped(served.runs / "rnn-2", yours, "22" * 32)
    found = get(served.client("read"), "compare", runs="rnn-1,rnn-2")
    assert (found["same_bits"], found["part_after"], found["part_at"]) == (False, after, at)


@pytest.mark.parametrize(("other", "same"), [(["11" * 32, "22" * 32], True), (["11" * 32, "33" * 32], False)])
def test_jobs_with_folds_are_compared_fold_by_fold(served, other, same):
    write_folds(served.runs / "cv-1", ["11" * 32, "22" * 32])
    write_folds(served.runs / "cv-2", other)
    assert get(served.client("read"), "compare", runs="cv-1,cv-2")["same_bits"] is same


def test_every_fold_that_a_page_names_has_a_page(served):
    write_folds(served.runs / "cv-1", ["11" * 32])
    past_work.write_search(served.runs / "small-1")
    write_run(served.runs / "small-1" / "trial-0" / "fold-0")
    client = served.client("read")
    for name in ("cv-1", "small-1~trial-0"):
        (fold,) = get(client, f"runs/{name}")["folds"]
        assert get(client, f"runs/{fold}")["run"] == fold == f"{name}~fold-0"


@pytest.mark.parametrize(("ended", "status"), [(True, "search finished"), (False, "search stopped")])
def test_the_page_of_a_search_tells_how_the_search_is(served, ended, status):
    past_work.write_search(served.runs / "small-1", ended=ended)
    client = served.client("read")
    assert get(client, "runs/small-1")["status"] == status
    assert [row["status"] for row in get(client, "runs", where="small")["rows"]] == [status]


def test_times_of_a_long_history_are_counted_from_its_start(served, monkeypatch):
    monkeypatch.setattr(history, "MAX_MARKS", 4)
    paths = write_run(served.runs / "long-1", [TOLD[0], *(("note", "driver", None, {"message": "x"}),) * 3])
    first_t = told_events()[0].t
    lost = [("worker_died", "driver", 30 + n, {"worker": f"worker-{n}", "reason": "exit code -9"}) for n in range(9)]
    append(paths, *told_events([*TOLD[:2], *lost])[2:])
    page = get(served.client("read"), "runs/long-1/timeline")
    assert page["started_t"] == first_t
    assert [mark["kind"] for mark in page["marks"]] == ["run_started", *["worker_died"] * 3]
    assert page["left_out"] == 6
    one = history.RunHistory(RunPaths(paths.root))
    one.catch_up()
    one.save()
    assert (history.RunHistory(paths).left_out, history.RunHistory(paths).started_t) == (6, first_t)
