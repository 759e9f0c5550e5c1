"""Compressions in the queue: the file of one that runs alone, whatever is killed, resized or has to make room."""

import copy

import pytest

from shoal.errors import ShoalError
from shoal.jobs import run_executor
from shoal.jobs.compression.answers import AnswerLog
from shoal.jobs.compression.compress import CompressRequest, compress
from shoal.jobs.queue import client, daemon
from shoal.jobs.resume import job_to_resume
from shoal.plan.queueing.work import SearchWork
from shoal.spec.compression.config import CompressConfig
from shoal.spec.compression.measured import read_recipe, read_report
from shoal.spec.load import make_job
from shoal.spec.run_paths import RunPaths
from tests.jobs.compression.conftest import PARENT
from tests.jobs.queue.test_daemon import Chosen, Restless, all_ended, serve, state_of, tick_until
from tests.jobs.search.conftest import SEARCH

__all__ = ["serve"]
LOSSLESS = ["compress.steps=[lossless]"]
PRUNE = {"target": {"size": 0.7}, "max_drop": 0.5, "steps": ["prune"], "tune": {"epochs": 2, "teacher": False}}


@pytest.fixture
def parent_job(job_dir):
    def make(**changes):
        return make_job(copy.deepcopy(PARENT) | changes, base_dir=str(job_dir))

    return make


@pytest.fixture
def parent(parent_job, paths, fork_server):
    """A finished run among those of the queue."""
    return run_executor.run(parent_job(steps=40), runs=paths.runs, fork_server=fork_server).paths


def recipe_of(root):
    found = read_recipe(root / "recipe.json")
    return found.steps, found.artefact_sha256, found.weights_sha256


def test_a_compression_that_is_killed_after_each_answer_gives_the_file_of_one_that_runs_alone(
    store, paths, parent, serve, fork_server, tmp_path
):
    alone = compress(
        CompressRequest(parent, tmp_path / "alone"), CompressConfig(steps=["lossless"]), fork_server=fork_server
    )
    entry = client.submit_compression(parent.name, runs=paths.runs, sets=LOSSLESS, user="ann", start=False)
    assert (entry.kind, entry.name) == ("compress", "parent-compressed")
    kills = 0
    while store.get(1).state != "finished":
        served = serve()
        tick_until(
            served, lambda served=served: all_ended(store)() or any(a.progressed for a in served._attempts.values())
        )
        if served._attempts:
            served._prove(0.0)
            served.executor.close()
            kills += 1
    assert kills >= 3, "each daemon died with one more answer"
    made = RunPaths.at(paths.runs / store.get(1).run)
    assert recipe_of(made.root) == recipe_of(alone.paths.root)
    assert read_report(made.root / "compression.json").chosen == "lossless"
    assert not (made.root / "rungs").exists()
    assert run_executor.load_run_state(made).status == "finished"


@pytest.mark.long
def test_a_compression_that_trains_is_resized_stopped_and_killed_and_gives_the_same_file(
    store, paths, parent, job, serve, fork_server, tmp_path, monkeypatch
):
    monkeypatch.setattr(daemon, "DECIDE_S", 0.7)
    alone = compress(
        CompressRequest(parent, tmp_path / "alone"), CompressConfig.model_validate(PRUNE), fork_server=fork_server
    )
    sets = [f"compress.{name}={value}" for name, value in (
        ("target", "{size: 0.7}"), ("max_drop", 0.5), ("steps", "[prune]"), ("tune", "{epochs: 2, teacher: false}"),
    )]  # fmt: skip
    client.submit_compression(parent.name, runs=paths.runs, sets=[*sets, "workers=1..2"], user="ann", start=False)
    first = serve(Restless(), cores=6)

    def tuned(minimum):
        found = list((paths.runs / store.get(1).run).glob("rungs/runs/tune-*/job.yaml")) if store.get(1).run else []
        return len(found) >= minimum

    tick_until(first, lambda: tuned(1))
    first.executor.close()  # it dies
    policy = Chosen()
    policy.shares = {1: 1}
    second = serve(policy)
    tick_until(second, lambda: state_of(store, 1) == "running")
    policy.shares = {}
    second._next_decision_s = 0.0
    tick_until(second, lambda: state_of(store, 1) == "waiting")
    with pytest.raises(ShoalError) as caught:
        job_to_resume(RunPaths.at(paths.runs / store.get(1).run), ())
    assert caught.value.code == "SH632"
    third = serve(Restless(), cores=6)
    tick_until(third, all_ended(store))
    assert state_of(store, 1) == "finished", store.get(1).reason
    assert recipe_of(paths.runs / store.get(1).run) == recipe_of(alone.paths.root)


def test_what_a_job_of_the_queue_trains_is_compressed_when_it_has_finished(store, paths, parent_job, serve):
    client.submit([parent_job(steps=20)], runs=paths.runs, user="ann", start=False)
    entry = client.submit_compression("1", runs=paths.runs, sets=LOSSLESS, user="ann", start=False)
    assert (entry.after, entry.state) == ((1,), "waiting")
    tick_until(serve(), all_ended(store))
    assert [one.state for one in store.entries()] == ["finished", "finished"], store.get(2).reason
    assert read_report(paths.runs / store.get(2).run / "compression.json").parent == store.get(1).run


def test_what_cannot_be_compressed_is_refused_before_anything_is_written(paths, job, parent_job, store):
    folds = {"kind": "stratified", "folds": 3}
    data = job().data.model_dump(mode="json") | {"split": folds}
    jobs = [(job(data=data), "SH614"), (job(lanes=4, workers=2, shard={"kind": "fsdp", "size": 2}), "SH110")]
    for number, (one, code) in enumerate(jobs, start=1):
        store.submit([one], user="ann")
        assert code_of(str(number), paths) == code
    store.submit([job(search=SEARCH, metrics=["accuracy"])], user="ann", work=SearchWork())
    assert code_of("3", paths) == "SH609"
    assert code_of("99", paths) == "SH646"
    assert code_of("nothing", paths) == "SH601"
    store.submit([parent_job()], user="ann")
    assert code_of("4", paths, "seed=7") == "SH609", "that would be another model"
    assert len(store.entries()) == 4


def code_of(parent, paths, *sets):
    with pytest.raises(ShoalError) as caught:
        client.submit_compression(parent, runs=paths.runs, sets=sets, start=False)
    return caught.value.code


def test_answers_are_kept_in_order_and_those_that_do_not_hold_any_more_are_asked_for_again(tmp_path):
    file = tmp_path / "model"
    file.write_bytes(b"weights")
    sha256 = "9a9c2b8ac0bb3c1fd4b3c7cd0ff94ad1b2bd1a0ca1b0b0c3a6c0f6ba0bd8b1d9"
    log = AnswerLog(tmp_path / "answers.jsonl")
    for answer in ({"n": 1}, {"n": 2}, {"deep": [{"path": str(file), "sha256": sha256}]}):
        log.add("a", answer)
    with (tmp_path / "answers.jsonl").open("ab") as torn:
        torn.write(b'{"key": "a", "ans')
    AnswerLog(tmp_path / "answers.jsonl").add("b", {"n": 3})
    again = AnswerLog(tmp_path / "answers.jsonl")
    assert [again.take("a") for _ in range(4)] == [{"n": 1}, {"n": 2}, None, None], (
        "the file is not the one that it was"
    )
    assert (again.take("b"), again.take("b")) == ({"n": 3}, None)
