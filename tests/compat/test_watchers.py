"""Trackers of experiments."""

import json
import struct

import pytest

from tests.conftest import MLP
from tests.jobs.fault_injection import fault_script

pytestmark = pytest.mark.compat

SHORT = MLP | {"steps": 6, "evaluate": {"every_steps": 3}}


@pytest.mark.compat("Weights & Biases, offline", "works", how="`watchers: [wandb]`")
def test_wandb(run):
    outcome = run(SHORT, watchers=["wandb"])
    assert outcome.status == "finished", outcome.error
    (file,) = (outcome.paths.root / "wandb").rglob("*.wandb")
    rows = list(_logged_by_wandb(file.read_bytes()))
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4, 5, 6]
    measured = [row for row in rows if "validation/accuracy" in row]
    assert [row["step"] for row in measured] == [3, 6]
    assert measured[-1]["validation/accuracy"] == outcome.receipt.metrics["accuracy"]


def test_wandb_on_two_workers_changes_no_bit(run):
    plain, seen = run(SHORT), run(SHORT, workers=2, watchers=["wandb"])
    assert seen.status == "finished", seen.error
    assert seen.receipt.weights_sha256 == plain.receipt.weights_sha256
    (file,) = (seen.paths.root / "wandb").rglob("*.wandb")
    steps = [row["step"] for row in _logged_by_wandb(file.read_bytes()) if "train/loss" in row]
    assert steps == [1, 2, 3, 4, 5, 6]


def _logged_by_wandb(content):
    """The rows in the file of an offline run: messages in the format of LevelDB's log, after a head of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    block, last_parts = 32768, (1, 4)
    at, message = 7, b""
    while at < len(content):
        if block - at % block < 7:  # no head of a part fits into the rest of a block
            at += block - at % block
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        message += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in last_parts:
            record, message = Record.FromString(message), b""
            if record.HasField("history"):
                yield {"/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


@pytest.mark.compat("MLflow, a directory of files", "works", how="`watchers: [mlflow]`")
def test_mlflow(run, resume, job_dir, monkeypatch):
    from mlflow import MlflowClient

    uri = (job_dir / "tracked").as_uri()
    outcome = run(SHORT, watchers=[{"name": "mlflow", "args": {"tracking_uri": uri}}])
    assert outcome.status == "finished", outcome.error
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # for the client of this test; the watcher sets its own
    client = MlflowClient(tracking_uri=uri)
    (tracked,) = client.search_runs([client.get_experiment_by_name("shoal").experiment_id])
    steps = [point.step for point in client.get_metric_history(tracked.info.run_id, "train/loss")]
    assert sorted(steps) == [1, 2, 3, 4, 5, 6]
    assert tracked.data.metrics["validation/accuracy"] == outcome.receipt.metrics["accuracy"]
    kill = {"name": "faults.py:KillAt", "args": {"steps": [5], "marks": str(job_dir)}}
    again = {"name": "mlflow", "args": {"tracking_uri": uri, "experiment": "again"}}
    failed = run(SHORT, watchers=[again, kill], elastic={"restarts": 0}, checkpoint={"every": "2 steps"})
    assert resume(failed.paths).status == "finished"
    (resumed,) = client.search_runs([client.get_experiment_by_name("again").experiment_id])
    steps = [point.step for point in client.get_metric_history(resumed.info.run_id, "train/loss")]
    assert sorted(steps) == [1, 2, 3, 4, 5, 6], "steps that were computed again are logged once"
    third = {"name": "mlflow", "args": {"tracking_uri": uri, "experiment": "third"}}
    leader = fault_script(job_dir, "kill worker 0 at step 4 in exchange")
    killed = run(SHORT, workers=2, lanes=2, watchers=[third, *leader])
    assert killed.receipt.deaths_survived == 1
    (one,) = client.search_runs([client.get_experiment_by_name("third").experiment_id])
    steps = [point.step for point in client.get_metric_history(one.info.run_id, "train/loss")]
    assert sorted(steps) == [1, 2, 3, 4, 5, 6], "the next leader goes on in the same run"
