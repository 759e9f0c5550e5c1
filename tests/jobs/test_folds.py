"""Folds: one job, several runs, one result."""

import json
import os
import signal
import statistics

import pytest

from shoal.checkpoint.manifest import list_manifests
from shoal.jobs.probes import run_probe
from shoal.spec.load import make_job
from tests.conftest import MLP

FOLDS = MLP | {"data": MLP["data"] | {"split": {"kind": "stratified", "folds": 3}}, "steps": 12}


def test_folds_are_merged(run):
    summary = run(FOLDS)
    values = [o.receipt.metrics["accuracy"] for o in summary.folds]
    assert len(values) == 3
    assert summary.metrics["accuracy"] == (statistics.fmean(values), statistics.stdev(values))
    receipt = json.loads((summary.folds[0].paths.parent_run.receipt).read_text())
    assert receipt["metrics"]["accuracy"]["mean"] == pytest.approx(statistics.fmean(values))


def test_side_by_side_or_one_after_the_other_is_the_same(run):
    def hashes(parallel):
        data = MLP["data"] | {"split": {"kind": "stratified", "folds": 3, "parallel": parallel}}
        return [o.receipt.weights_sha256 for o in run(FOLDS, data=data).folds]

    assert hashes(1) == hashes(3)


def test_a_fold_is_the_same_as_the_run_of_that_fold_alone(run):
    data = MLP["data"] | {"split": {"kind": "stratified", "folds": 3, "fold": 1}}
    assert run(FOLDS, data=data).receipt.weights_sha256 == run(FOLDS).folds[1].receipt.weights_sha256


def test_a_job_with_folds_is_resumed_where_it_broke_off(run, resume, job_dir):
    undisturbed = run(FOLDS)
    kill = {"name": "faults.py:KillAt", "args": {"steps": [5], "marks": str(job_dir)}}
    broken = run(FOLDS, watchers=[kill], elastic={"restarts": 0})
    assert broken.status == "failed"
    assert len(broken.folds) == 1
    again = resume(broken.folds[0].paths.parent_run)
    assert [o.receipt.weights_sha256 for o in again.folds] == [o.receipt.weights_sha256 for o in undisturbed.folds]


def test_a_stop_between_two_folds_is_no_end(run, resume):
    def stop(paths, event, run_state):
        if event.kind == "finished" and paths.name == "fold-0":
            os.kill(os.getpid(), signal.SIGINT)

    stopped = run(FOLDS, look=stop)
    assert [o.status for o in stopped.folds] == ["finished", "interrupted", "interrupted"]
    assert stopped.status == "interrupted"
    assert len(resume(stopped.folds[0].paths.parent_run).metrics) == len(run(FOLDS).metrics)


def test_folds_share_what_they_have_in_common(run):
    wide = {"name": "models.py:mlp", "args": {"inputs": 64, "classes": 10, "hidden": 300}}
    summary = run(FOLDS, model=wide, init_from={"freeze": ["0"]})
    store = summary.folds[0].paths.checkpoints
    manifests = [list_manifests(store, name=f"fold-{n}")[-1] for n in range(3)]
    blobs = [set(m.blobs) for m in manifests]
    assert set.intersection(*blobs), "the frozen layer is stored once"


@pytest.mark.parametrize("split", [
    {"kind": "timeseries", "folds": 3, "gap": 2}, {"kind": "bootstrap", "folds": 2}, {"kind": "windows", "folds": 2},
])  # fmt: skip
def test_every_kind_of_folds_runs(run, split):
    summary = run(FOLDS, data=MLP["data"] | {"split": split}, steps=2)
    assert summary.status == "finished"
    assert len(summary.folds) == split["folds"]


def test_the_split_is_described_and_exported(job_dir, fork_server):
    import pyarrow.parquet as pq

    job = make_job(FOLDS, base_dir=str(job_dir))
    answer = run_probe("split", job, fork_server=fork_server, export=str(job_dir / "out"))
    folds = answer["report"]["folds"]
    assert [f["parts"]["validation"]["size"] for f in folds] == [599, 599, 599]
    table = pq.read_table(job_dir / "out" / "split.parquet")
    assert table.num_rows == 3 * 1797
    assert {"fold", "part", "id"} <= set(table.column_names)


def test_leaks_are_named(job_dir, run, fork_server):
    rows = "".join(f"{i},{i % 2}\n" for i in range(40))
    (job_dir / "a.csv").write_text("u,y\n" + rows + rows)
    (job_dir / "b.csv").write_text("u,y\n" + "3,1\n500,1\n")
    data = {"source": {"kind": "csv", "path": "a.csv", "target": "y"}, "split": {"kind": "holdout"}, "leaks": "fail"}
    model = {"name": "models.py:mlp", "args": {"inputs": 1, "classes": 2}}
    outcome = run(MLP, data=data, model=model, steps=2)
    assert outcome.error.code == "SH353"
    assert "identical" in outcome.error.message
    other = {**data, "split": "none", "validation": {"kind": "csv", "path": "b.csv", "target": "y"}}
    assert run(MLP, data=other, model=model, steps=2).error.code == "SH353"
    job = make_job(MLP | {"data": other, "model": model}, base_dir=str(job_dir))
    assert "identical" in run_probe("split", job, fork_server=fork_server)["leaks_between_sources"][0]
