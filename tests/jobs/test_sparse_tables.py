"""Sparse tables: only touched rows travel, and the bits are the same on any number of workers and servers, whoever
dies."""

import pytest
import torch
from sklearn.datasets import load_digits

import shoal
from shoal.checkpoint.manifest import list_manifests
from shoal.checkpoint.store import CheckpointStore
from shoal.errors import ShoalError
from shoal.jobs import run_index
from shoal.jobs.probes import run_probe
from shoal.spec.job import Job
from shoal.spec.load import load_job, make_job, save_job
from tests.conftest import MLP, long_only
from tests.jobs.fault_injection import (
    assert_nothing_left,
    assert_same,
    events_of_kind,
    fault_script,
    fired_faults,
    time_limit,
)
from tests.jobs.test_parameter_servers import InterruptAfterSave, ServerKiller, server_sync

WORDS = MLP | {
    "name": "words",
    "model": {"name": "sparse.py:SparseDigits"},
    "optimizer": {"name": "AdamW", "args": {"lr": 0.01}},
    "sync": server_sync(1, 0),
    "steps": 24,
    "lanes": 4,
    "evaluate": {"every_steps": 8},
}
SUMMED = {k: v for k, v in WORDS.items() if k not in ("model", "loss", "metrics")} | {
    "task": "sparse.py:WeightedSparseTask"
}
JOBS = {
    "words": WORDS,
    "clipped": WORDS | {"clip": {"value": 0.001}, "batch_size": 47, "lanes": 7},
    "norm": WORDS | {"clip": {"norm": 0.1}},
    "summed": SUMMED,
}
_alone = {}


@pytest.fixture(autouse=True)
def limited_time():
    with time_limit(240):
        yield


def alone(run, name, **changes):
    """What one worker and one server make of it."""
    key = name, repr(changes)
    if key not in _alone:
        outcome = run(JOBS[name] | changes, runs="alone")
        assert outcome.status == "finished", outcome.error
        _alone[key] = outcome.receipt
    return _alone[key]


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize(("workers", "servers", "backups"), [(2, 2, 1), *long_only((3, 3, 1))])
def test_the_same_rows_whoever_trains(name, workers, servers, backups, run):
    outcome = run(JOBS[name], workers=workers, sync=server_sync(servers, backups))
    assert_same(outcome, alone(run, name))
    assert outcome.receipt.exact is None
    assert "sparse tables are on servers" in outcome.receipt.why
    assert_nothing_left(outcome)


def test_only_touched_rows_travel_and_are_stored(run):
    """Of 10 million rows there are 64 times 17 that a digit can have."""
    outcome = run(WORDS, workers=2, sync=server_sync(2))
    a_step = 4 * 2088 * (8 + 8 + 4 * 8)  # four lanes ask for rows and push them: two keys and a gradient
    assert outcome.receipt.bytes_sent / 24 < a_step
    words, pairs = (sum(row["counts"][table] for row in _saved(outcome)) for table in range(2))
    assert 500 < words <= 64 * 17
    assert 300 < pairs <= 1000


def _saved(outcome):
    """What the manifest says of rows."""
    store = CheckpointStore(outcome.paths.checkpoints, job_sha256=None)
    return store.load_latest(section="loop")[1]["sync"]["rows"]


def test_it_learns(run):
    assert alone(run, "words", steps=100).metrics["accuracy"] > 0.9


@pytest.mark.parametrize("seed", long_only(0, 1, 2, 3))
def test_servers_and_workers_die_and_no_row_is_lost(seed, job_dir, run):
    lines = ["kill worker 0 at step 30 in exchange", "kill worker 1 at step 60 in compute"]
    killer = ServerKiller(15, 75, seed=seed)
    outcome = run(WORDS, steps=100, workers=3, sync=server_sync(3), watchers=fault_script(job_dir, *lines), look=killer)
    assert_same(outcome, alone(run, "words", steps=100))
    assert killer.killed == 2
    assert len(fired_faults(job_dir)) == 2
    assert_nothing_left(outcome)


@pytest.mark.long
def test_without_backup_the_checkpoint_is_used(run):
    outcome = run(
        WORDS,
        steps=100,
        workers=2,
        sync=server_sync(2, 0),
        checkpoint={"every": "10 steps"},
        look=ServerKiller(60, copies=1),
    )
    assert_same(outcome, alone(run, "words", steps=100))
    assert events_of_kind(outcome, "servers_lost")


# ---- checkpoints ----


@pytest.mark.long
@pytest.mark.parametrize("after", [server_sync(3), server_sync(1, 0)])
def test_resume_with_other_servers(after, run, resume):
    first = run(
        WORDS, steps=100, workers=2, sync=server_sync(2), checkpoint={"every": "5 steps"}, look=InterruptAfterSave(10)
    )
    assert first.status != "finished"
    save_job(Job.model_validate(load_job(first.paths.job).dump() | {"sync": after}), first.paths.job)
    assert_same(resume(first.paths), alone(run, "words", steps=100))


def test_rows_go_with_their_checkpoint(run):
    """Of each checkpoint that is kept all blobs are there, of others none."""
    outcome = run(WORDS, sync=server_sync(2), checkpoint={"every": "3 steps", "keep": 2, "keep_best": 0})
    kept = list_manifests(str(outcome.paths.checkpoints))
    assert [manifest.step for manifest in kept] == [row.step for row in events_of_kind(outcome, "saved")][:-3:-1]
    blobs = {file.name for file in (outcome.paths.checkpoints / "blobs").rglob("*") if file.is_file()}
    assert blobs == {digest for manifest in kept for digest in manifest.blobs}


def test_a_damaged_blob_of_rows_is_found(run, resume):
    first = run(WORDS, steps=60, sync=server_sync(2), checkpoint={"every": "5 steps"}, look=InterruptAfterSave(10))
    newest = list_manifests(str(first.paths.checkpoints))[0]
    dense = {ref.blob for ref in newest.tensors.values()}
    blobs = [first.paths.checkpoints / "blobs" / it[:2] / it for it in newest.blobs.keys() - dense]
    file = max(blobs, key=lambda it: it.stat().st_size)  # some may have no rows
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    second = resume(first.paths)
    assert second.error.code == "SH416"
    assert "SHA-256" in second.error.message


# ---- what it needs ----


def test_without_servers_it_is_refused(run):
    outcome = run(WORDS, sync={"kind": "lanes"})
    assert outcome.error.code == "SH418"


@pytest.mark.long
def test_stale(run):
    outcome = run(WORDS, steps=80, workers=3, sync=server_sync(2, 1, 2), checkpoint={"every": "20 steps"})
    assert outcome.status == "finished", outcome.error
    assert outcome.receipt.metrics["accuracy"] > 0.7


# ---- the result ----


def test_a_finished_model_has_its_rows(run, fork_server, job_dir):
    outcome = run(WORDS, steps=60, sync=server_sync(2))
    job = load_job(outcome.paths.job, check_names=False)
    where = {"weights": run_index.find_weights(outcome.paths, job, best=False)}
    rows = run_index.find_checkpoint(outcome.paths, job, best=False)
    answer = run_probe("evaluate", job, fork_server=fork_server, **where, rows=rows, part="validation", source=None)
    assert answer["metrics"]["validation"] == outcome.receipt.metrics
    with pytest.raises(ShoalError, match="SH419"):
        run_probe("evaluate", job, fork_server=fork_server, **where, part="validation", source=None)


def test_load(run, monkeypatch):
    outcome = run(WORDS, steps=60, sync=server_sync(2))
    monkeypatch.chdir(outcome.paths.root.parents[1])
    model = shoal.load(outcome.paths.root)
    digits = load_digits()
    right = model(torch.from_numpy(digits.data).float()).argmax(1).numpy() == digits.target
    assert right.mean() > 0.7


def test_check_makes_a_step_without_servers(run, fork_server, job_dir):
    job = make_job(WORDS, base_dir=str(job_dir))
    assert run_probe("check", job, fork_server=fork_server)["loss"] > 0
