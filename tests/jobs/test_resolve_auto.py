"""`sync: auto`: a run is planned before it starts, and what it then is stands in its directory."""

import json
import threading

import pytest
import yaml

from shoal.errors import ShoalError
from shoal.events import EventReader
from shoal.jobs import planner
from shoal.jobs.commands import scale
from shoal.jobs.plan_file import read_plan_file
from shoal.jobs.resolve_auto import apply_choice, resolve_auto
from shoal.jobs.run_executor import load_run_state
from shoal.jobs.verify import verify
from shoal.plan.costs.model import RunChoice
from shoal.spec.load import load_job, make_job
from shoal.terminal import plan_lines
from tests.conftest import MLP
from tests.jobs.fault_injection import fault_script, fired_faults
from tests.jobs.job_profile import JOB_PROFILE


def answer(found):
    """The steps of a probe that knows it already."""
    return found
    yield ()


@pytest.fixture
def measured(monkeypatch):
    """The probe finds what it is told."""

    def go(**changes):
        monkeypatch.setattr(planner, "measure_steps", lambda job, fork_servers: answer(JOB_PROFILE | changes))

    return go


def job(job_dir, **changes):
    return make_job(MLP | {"sync": "auto"} | changes, base_dir=str(job_dir))


def test_a_planned_run_is_exact_and_says_what_it_is(run, job_dir):
    plain = run(MLP)
    found = run(MLP, sync="auto", name="auto")
    assert found.receipt.weights_sha256 == plain.receipt.weights_sha256
    written = load_job(found.paths.job, check_names=False)
    assert written.sync.kind in ("lanes", "server")
    assert (written.lanes, written.codec.kind, written.threads) == (4, "none", 1)
    assert written.workers.least == written.workers.most
    (event,) = [event for event in EventReader(found.paths.events).read_new() if event.kind == "plan"]
    assert event["choice"]["workers"] == written.workers.most
    parts = [event["prediction"][name] for name in ("compute_s", "encode_s", "exchange_s", "apply_s")]
    assert sum(parts) == pytest.approx(event["prediction"]["step_s"], rel=0.01)
    assert event["reason"]
    assert all(other["reason"] for other in event["others"])
    assert read_plan_file(found.paths).told == json.loads(json.dumps(event.fields))
    shown = plan_lines.plan_lines(load_run_state(found.paths))
    assert shown[0].startswith(f"plan: {written.workers.most} worker")


@pytest.mark.parametrize(
    ("choice", "sync"),
    [
        (RunChoice(workers=2), {"kind": "lanes"}),
        (RunChoice(workers=3, sync="server", servers=2), {"kind": "server", "servers": 2, "backups": 1}),
        (RunChoice(workers=2, sync="local", every=8, settle=4), {"kind": "local", "every": 8, "rounds_per_sync": 4}),
        (RunChoice(workers=3, codec="int8", threads=2), {"kind": "lanes"}),
    ],
)
def test_a_choice_becomes_a_job(job_dir, choice, sync):
    made = apply_choice(job(job_dir, workers="1..3", lanes=None), choice)
    assert sync.items() <= made.sync.model_dump().items()
    assert (made.workers.least, made.workers.most, made.lanes) == (choice.workers, choice.workers, 3)
    assert (made.codec.kind, made.threads) == (choice.codec, choice.threads)


def test_settings_of_the_jobs_own_codec_are_kept(job_dir):
    made = apply_choice(job(job_dir, codec={"kind": "int8", "block": 64}), RunChoice(workers=2, codec="int8"))
    assert made.codec.block == 64


def test_what_is_not_left_open_is_not_planned(job_dir):
    plain = make_job(MLP, base_dir=str(job_dir))
    assert resolve_auto(plain) == (plain, None)


def test_a_worker_for_each_core(job_dir, measured):
    measured()
    made, kept = resolve_auto(job(job_dir))
    assert made.workers.most == min(4, 2 * len(planner.os.sched_getaffinity(0)))
    assert kept.told["choice"]["workers"] == made.workers.most


@pytest.mark.parametrize(("workers", "most"), [("1..2", 2), (1, 1), (3, 3), ("2..3", 2)])
def test_a_plan_keeps_to_the_jobs_workers(job_dir, measured, workers, most):
    measured()
    made, _ = resolve_auto(job(job_dir, workers=workers))
    assert made.workers.most == most


def test_what_changes_the_result_is_offered_and_taken_only_when_allowed(job_dir, measured):
    threads = {
        "times": [*JOB_PROFILE["times"], {"threads": 2, "forward_s": 0.002, "backward_s": 0.004, "apply_s": 0.001}]
    }
    measured(**threads)
    made, kept = resolve_auto(job(job_dir, workers=1))
    assert made.threads == 1
    assert kept.told["offer"]["needs"] == ["threads"]
    allowed, kept = resolve_auto(job(job_dir, workers=1, plan={"allow": ["threads"]}))
    assert allowed.threads == 2
    assert kept.told["offer"] is None


def test_no_way_at_all(job_dir, measured):
    measured(memory_bytes=10**8)
    with pytest.raises(ShoalError, match=r"SH621 sync: lanes: needs 0\.2 GB, the machine has 0\.1 GB"):
        resolve_auto(job(job_dir))


def test_a_job_that_is_verified_is_planned_once(job_dir, fork_server, monkeypatch):
    asked = []
    monkeypatch.setattr(planner, "measure_steps", lambda job, fork_servers: answer(asked.append(job) or JOB_PROFILE))
    verdict = verify(job(job_dir, steps=4, evaluate={}), [1, 2], runs=job_dir / "runs", fork_server=fork_server)
    assert verdict.same
    assert len(asked) == 1


def test_folds_share_a_plan(run, measured, job_dir):
    measured()
    data = MLP["data"] | {"split": {"kind": "kfold", "folds": 2}}
    found = run(MLP, sync="auto", workers="1..2", steps=4, evaluate={}, data=data)
    assert found.status == "finished"
    for outcome in found.folds:
        assert load_run_state(outcome.paths).plan["choice"]["workers"] == 2
        assert yaml.safe_load(outcome.paths.job.read_text())["sync"] == {"kind": "lanes", "exchange": "auto"}


@pytest.mark.long
def test_a_run_that_is_other_than_planned_is_planned_again(run, measured):
    """Lanes are much shorter than was said, and workers wait for each other: two are no better than one."""
    measured()
    plain = run(MLP, steps=600, evaluate={})
    faults = {"pause_probability": 1.0, "pause_s": 0.005}
    found = run(MLP, sync="auto", workers="1..2", steps=600, evaluate={}, faults=faults)
    assert found.receipt.weights_sha256 == plain.receipt.weights_sha256
    first = load_run_state(found.paths).replans[0]
    assert first["choice"]["workers"] == 2
    assert first["prediction"] == read_plan_file(found.paths).told["prediction"]
    assert 0.005 < first["truth"]["step_s"] < first["prediction"]["step_s"] / 1.5
    assert first["moves"]["workers"] == 1
    views = [
        event
        for event in EventReader(found.paths.events).read_new()
        if event.kind == "view" and "carries" in event.fields
    ]
    assert [len(view["carries"]) for view in views] == [2, 1]
    assert first["expected"]["step_s"] < first["truth"]["step_s"]
    assert plan_lines.plan_lines(load_run_state(found.paths))[-1].startswith("  again, with ")


@pytest.mark.long
def test_what_a_user_chose_is_left_alone(run, measured):
    measured()
    asked = []

    def look(paths, event, run_state):
        if event.kind == "step" and not asked:
            asked.append(threading.Thread(target=scale, args=(paths, 2)))
            asked[0].start()

    faults = {"pause_probability": 1.0, "pause_s": 0.005}
    found = run(MLP, sync="auto", workers="1..2", steps=600, evaluate={}, faults=faults, look=look)
    asked[0].join()
    first = load_run_state(found.paths).replans[0]
    assert first["moves"] is None
    assert "a user chose the number of workers" in first["reason"]


@pytest.mark.long
def test_a_death_in_a_planned_run_is_a_death_like_any_other(run, measured, job_dir):
    """For a moment there are fewer than the job wants, and what is known is of more."""
    measured()
    faults = {"pause_probability": 1.0, "pause_s": 0.005}
    line = "kill worker 1 at step 500 in compute"
    found = run(
        MLP, sync="auto", workers=2, steps=600, evaluate={}, faults=faults, watchers=fault_script(job_dir, line)
    )
    assert found.receipt.weights_sha256 == run(MLP, steps=600, evaluate={}).receipt.weights_sha256
    assert fired_faults(job_dir) == {line}
    assert all(row["choice"]["workers"] == 2 for row in load_run_state(found.paths).replans)
