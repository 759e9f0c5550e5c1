"""Verifications in the queue: the verdict of one that runs alone, whatever is killed or has to make room."""

import pytest

from shoal.errors import ShoalError
from shoal.jobs import run_executor, verify
from shoal.jobs.queue import client
from shoal.jobs.queue.verification import read_verdict
from shoal.jobs.resume import job_to_resume
from shoal.plan.queueing.work import VerifyWork
from shoal.spec.run_paths import RunPaths
from tests.jobs.queue.test_daemon import Chosen, all_ended, serve, state_of, tick_until
from tests.jobs.test_verify import UNEVEN

__all__ = ["serve"]
TWO = VerifyWork(workers=(1, 2))


def directory(paths, entry):
    return RunPaths.at(paths.runs / entry.run)


def test_a_verification_that_loses_its_daemon_and_its_workers_says_what_one_says_that_runs_alone(
    store, paths, job, serve, fork_server
):
    made = job(name="small", steps=60)
    alone = verify.verify(made, [1, 2], runs=paths.runs.parent / "alone", fork_server=fork_server)
    (entry,) = client.submit([made], runs=paths.runs, user="ann", start=False, work=TWO)
    assert (entry.kind, entry.name, entry.needs.least, entry.needs.most) == ("verify", "small-verify", 2, 2)
    policy = Chosen()
    policy.shares = {1: 2}
    first = serve(policy)
    tick_until(first, lambda: first._attempts and first._attempts[1].progressed)
    first.executor.close()  # it dies
    second = serve(policy)
    tick_until(second, lambda: (directory(paths, store.get(1)).root / "run-2").exists())
    ended = (directory(paths, store.get(1)).root / "run-1" / "receipt.json").stat().st_mtime_ns
    policy.shares = {}
    second._next_decision_s = 0.0
    tick_until(second, lambda: state_of(store, 1) in ("waiting", "finished"))
    policy.shares = {1: 2}
    second._next_decision_s = 0.0
    tick_until(second, all_ended(store))
    entry = store.get(1)
    assert entry.state == "finished", entry.reason
    found = read_verdict(directory(paths, entry).root)
    assert found.same
    assert [(n, r.weights_sha256, r.state_sha256) for n, r in found.receipts] == [
        (n, r.weights_sha256, r.state_sha256) for n, r in alone.receipts
    ]
    assert (directory(paths, entry).root / "run-1" / "receipt.json").stat().st_mtime_ns == ended, "it was run again"
    assert run_executor.load_run_state(directory(paths, entry)).status == "finished"
    assert [one.name for one in paths.runs.glob("small-*")] == [entry.run]
    with pytest.raises(ShoalError) as caught:
        job_to_resume(directory(paths, entry), ())
    assert caught.value.code == "SH632"


@pytest.mark.long
def test_runs_that_differ_are_a_failure_that_names_step_and_tensor_and_holds_what_comes_after(store, paths, job, serve):
    made = job(**{key: value for key, value in UNEVEN.items() if key not in ("metrics", "evaluate")})
    client.submit([made], runs=paths.runs, user="ann", start=False, work=TWO)
    client.submit([job(steps=3)], runs=paths.runs, user="ann", start=False, after=[1])
    tick_until(serve(), all_ended(store))
    assert [one.state for one in store.entries()] == ["failed", "held"]
    assert store.get(1).reason.startswith("SH636")
    parted = read_verdict(directory(paths, store.get(1)).root).divergence
    assert (parted.step, parted.tensors[0]) == (6, "model/extra")


def test_what_cannot_be_verified_is_refused_before_anything_is_written(paths, job):
    for wrong, code in ((job(lanes=2), "SH107"), (job(lanes=4, workers=2, shard={"kind": "fsdp", "size": 2}), "SH110")):
        with pytest.raises(ShoalError) as caught:
            client.submit([wrong], runs=paths.runs, start=False, work=VerifyWork(workers=(2, 4)))
        assert caught.value.code == code
    assert client.look(paths.runs).entries == {}
