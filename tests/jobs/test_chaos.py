"""Faults on purpose, from outside: the weights are those of the undisturbed run."""

import contextlib
import json
import signal
import subprocess

import pytest
import yaml

from shoal.errors import ShoalError
from shoal.events import Event, RunState, read_events
from shoal.events.state_parts import ServerSummary
from shoal.jobs.chaos import FaultInjector, chaos
from shoal.plan.fault_plan import parse_faults
from shoal.spec.load import make_job
from tests.conftest import MLP
from tests.jobs.test_verify import command

__all__ = ["command"]

LASTING = MLP | {
    "steps": 250,
    "evaluate": {"every_steps": 100},
    "watchers": [{"name": "delays.py:SlowSteps", "args": {"seconds": 0.005}}],
}
FAULTS = """
    kill worker 1 at step 5
    slow worker 0 at step 20
    join at step 30
    freeze worker 2 at step 60
    kill worker 0 at step 100
"""


def ignore(*_):
    pass


@pytest.mark.long
def test_a_bad_day_changes_nothing(job_dir, fork_server):
    told = []

    def look(paths, event, run_state):
        if event.who == "chaos":
            told.append(event["text"])

    job = make_job(LASTING, base_dir=str(job_dir))
    verdict = chaos(job, parse_faults(FAULTS), workers=3, runs=job_dir / "runs", on_event=look, fork_server=fork_server)
    assert verdict.outcome.status == "finished", verdict.outcome.error
    assert (verdict.injected, verdict.planned) == (5, 5)
    assert verdict.same
    assert verdict.outcome.receipt.deaths_survived == 3
    assert verdict.outcome.receipt.views > verdict.undisturbed.views
    assert [text.partition(" (")[2] for text in told] == [f"{fault})" for fault in parse_faults(FAULTS)]
    evicted = [event for event in read_events(verdict.outcome.paths.events) if event.kind == "evicted"]
    assert len(evicted) == 1, evicted  # the frozen one, and not the slow one
    assert "frozen" in evicted[0]["reason"]


@pytest.mark.long
def test_the_command(job_dir, command):
    (job_dir / "job.yaml").write_text(yaml.safe_dump(LASTING))
    words = ["--kills", 2, "--joins", 1, "--seed", 3, "--workers", 2, "--json"]
    code, said = command("chaos", "job.yaml", *words)
    assert code == 0, said.err
    first = json.loads(said.out)
    assert (first["same"], first["planned"], first["happened"]) == (True, 3, 3)

    (job_dir / "plan.txt").write_text("kill worker 0 at step 10\nkill worker 0 at step 5000000\n")
    against = ["--against", first["undisturbed"]["run"], "--plan", "plan.txt", "--workers", 2]
    code, said = command("chaos", "job.yaml", *against, "-q")
    assert code == 0, said.err
    assert "1 of 2 faults happened; the run ended before the others" in said.out
    code, said = command("chaos", "job.yaml", *against, "--set", "seed=5")
    assert (code, "SH616" in said.err) == (6, True)


@pytest.mark.long
def test_one_worker_alone_is_started_again(job_dir, fork_server):
    job = make_job(LASTING | {"checkpoint": {"every": "20 steps"}}, base_dir=str(job_dir))
    faults = parse_faults("kill worker 0 at step 50\nkill worker 0 at step 150")
    verdict = chaos(job, faults, workers=1, runs=job_dir / "runs", on_event=ignore, fork_server=fork_server)
    assert (verdict.same, verdict.injected) == (True, 2)
    assert verdict.outcome.receipt.deaths_survived == 2


def test_more_workers_than_lanes_are_refused(job_dir, fork_server):
    with pytest.raises(ShoalError, match="SH107"):
        chaos(
            make_job(MLP, base_dir=str(job_dir)),
            {"kill": 1},
            workers=9,
            runs=job_dir,
            on_event=ignore,
            fork_server=fork_server,
        )


def test_servers_are_killed_only_while_all_that_are_wanted_serve(tmp_path):
    run_state, step = RunState(wanted_servers=2), Event("step", who="worker-0")
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(subprocess.Popen(["sleep", "100"])) for _ in range(3)]
        for process in processes:
            stack.callback(process.kill)
        servers = [ServerSummary(f"server-{n}", pid=p.pid, state="serving") for n, p in enumerate(processes)]
        run_state.servers = {server.name: server for server in servers[:2]}
        happening = stack.enter_context(
            contextlib.closing(FaultInjector(parse_faults("kill server 1 at step 0\n" * 2), 1, ignore))
        )
        for _ in range(3):
            happening.on_event(tmp_path, step, run_state)
        assert processes[1].wait() == -signal.SIGKILL
        assert happening.injected == 1, "one must be left, and the other one is not replaced yet"
        servers[1].state = "dead"
        run_state.servers["server-2"] = servers[2]
        happening.on_event(tmp_path, step, run_state)
        assert happening.injected == 2
        assert processes[2].wait() == -signal.SIGKILL
        assert processes[0].poll() is None


def test_a_job_without_servers_has_none_to_kill(job_dir, fork_server):
    job = make_job(MLP, base_dir=str(job_dir))
    with pytest.raises(ShoalError, match=r"SH609.*has no servers"):
        chaos(job, {"kill server": 1}, workers=2, runs=job_dir, on_event=ignore, fork_server=fork_server)


def test_workers_on_other_machines_are_not_signalled(job_dir, fork_server):
    job = make_job(MLP | {"engine": {"kind": "ssh", "hosts": ["one"]}}, base_dir=str(job_dir))
    with pytest.raises(ShoalError, match=r"SH110.*faults with the engine ssh"):
        chaos(job, {"kill": 1}, workers=2, runs=job_dir, on_event=ignore, fork_server=fork_server)
