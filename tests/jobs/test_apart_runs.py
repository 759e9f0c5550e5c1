"""Workers without the run's directory: the same bits as one undisturbed worker, whatever is killed.

Agents and workers are real processes on this machine. They get no path of the run: a directory of their own, and the
driver's port.
"""

import contextlib
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from shoal.errors import ShoalError
from shoal.events import read_events
from shoal.jobs import commands, run_executor
from shoal.jobs.probes import run_probe
from shoal.spec.load import make_job
from shoal.spec.run_paths import RunPaths
from tests.conftest import CNN, GPT, MLP
from tests.fleet.slurm_cluster import free_ports
from tests.fleet.test_notice import MetadataService, service  # noqa: F401
from tests.jobs.background_run import background_run
from tests.jobs.fault_injection import assert_same, fault_script, fired_faults, reference_receipt
from tests.net.recording_proxy import RecordingProxy

APART = {"kind": "local", "apart": True}
TWO_MACHINES = APART | {"machines": 2}
LONGER = MLP | {"steps": 2000, "evaluate": {"every_steps": 1000}}  # minutes while steps are slow
SMALL = MLP | {"steps": 24, "evaluate": {"every_steps": 8}}


def agents_of(process):
    found = []
    for one in process.children(recursive=True):
        with contextlib.suppress(psutil.ZombieProcess, psutil.NoSuchProcess):  # it has ended
            found += [one] if "shoal.fleet.agents.host_agent" in " ".join(one.cmdline()) else []
    return found


def open_files_below(pid, root):
    """Everything of the process that is a path below this directory."""
    process = psutil.Process(pid)
    named = [
        process.cwd(),
        *process.cmdline(),
        *process.environ().values(),
        *(file.path for file in process.open_files()),
    ]
    return [name for name in named if str(root) in name]


def test_the_same_bits_through_a_kill_without_the_runs_directory(run, job_dir):
    """Checkpoints, the model, output and events all come through the driver."""
    seen = []

    def look(paths, event, state):
        if event.kind == "worker_started":
            seen.extend(open_files_below(event["pid"], paths.root))

    job = SMALL | {"export": ["program"]}
    faults = fault_script(job_dir, "kill worker 1 at step 7")
    outcome = run(job, look, workers=2, engine=APART, watchers=faults, checkpoint={"every": "4 steps"})
    assert fired_faults(job_dir) == {"kill worker 1 at step 7"}
    assert_same(outcome, reference_receipt(run, job))
    assert outcome.receipt.deaths_survived == 1
    assert seen == []
    assert (outcome.paths.model / "model.pt2").is_file()
    assert outcome.receipt.bytes_saved > 0
    assert agents_of(psutil.Process()) == []


@pytest.mark.long
def test_a_failure_in_the_users_code_is_the_runs_failure(run, job_dir):
    (job_dir / "broken.py").write_text("def model():\n    print('here I am', flush=True)\n    raise KeyError('no')\n")
    printed = []

    def look(paths, event, state):
        if event.kind == "printed":
            printed.append(event["text"])

    outcome = run(SMALL, look, model="broken.py:model", engine=APART, workers=1)
    assert outcome.status == "failed"
    assert "KeyError" in str(outcome.error)
    assert printed == ["here I am"]
    assert "KeyError" in (outcome.paths.error_log(0)).read_text()


def test_what_cannot_be_sent_is_told_before_anything_starts(run, job_dir):
    with (job_dir / "large.bin").open("wb") as file:
        file.truncate(201 << 20)
    with pytest.raises(ShoalError, match="SH655"):
        run(SMALL, engine=APART)
    assert not (job_dir / "runs").exists() or list((job_dir / "runs").iterdir()) == []


@pytest.mark.parametrize("name", ["mlp", *(pytest.param(name, marks=pytest.mark.long) for name in ("cnn", "gpt"))])
def test_the_same_bits_on_two_machines_that_share_nothing(name, run, job_dir):
    job = {"mlp": MLP, "cnn": CNN, "gpt": GPT}[name] | {"steps": 16}
    faults = fault_script(job_dir, "kill worker 0 at step 5", "kill worker 1 at step 9")
    outcome = run(job, workers=2, engine=TWO_MACHINES, watchers=faults, checkpoint={"every": "3 steps"})
    assert len(fired_faults(job_dir)) == 2
    assert_same(outcome, reference_receipt(run, job))
    assert outcome.receipt.deaths_survived == 2


@pytest.mark.long
def test_the_trace_of_a_run_on_two_machines_is_that_of_a_run_on_this_one(job_dir, fork_server):
    """Digests of the state after every step, which `shoal verify` compares. They come through the driver too."""

    def traced(runs, **changes):
        job = make_job(SMALL | {"export": []} | changes, base_dir=str(job_dir))
        outcome = run_executor.run(job, runs=job_dir / runs, fork_server=fork_server, trace=True)
        assert outcome.status == "finished", outcome.error
        return [json.loads(line) for line in outcome.paths.trace.read_text().splitlines()]

    here = traced("here", workers=1)
    assert [row["step"] for row in here] == list(range(1, SMALL["steps"] + 1))
    assert traced("apart", workers=2, engine=TWO_MACHINES) == here


@pytest.mark.long
def test_the_loss_of_an_agent_is_survived_by_the_other_machine(run, job_dir):
    ready = job_dir / "ready"
    slow = [{"name": "delays.py:SlowSteps", "args": {"seconds": 0.2, "until": str(ready)}}]
    with background_run(run, LONGER, workers=2, engine=TWO_MACHINES, watchers=slow) as it:
        it.wait_for_workers(2)
        doomed = agents_of(psutil.Process())[0]
        workers = doomed.children(recursive=True)
        doomed.kill()
        psutil.wait_procs(workers, timeout=30)
        assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in workers)
        it.wait_until(lambda state: any(w.state == "dead" for w in state.workers.values()))
        it.wait_for_workers(2)
        ready.touch()
    outcome = it.outcome.result()
    assert_same(outcome, reference_receipt(run, LONGER))
    reasons = [event["reason"] for event in it.events if event.kind == "worker_died"]
    assert len(reasons) == 1
    assert re.fullmatch(r"the loss of host machine-[01]", reasons[0])


@pytest.mark.long
def test_the_loss_of_the_only_agent_is_a_restart_from_the_checkpoint(run, job_dir):
    ready = job_dir / "ready"
    slow = [{"name": "delays.py:SlowSteps", "args": {"seconds": 1.0, "until": str(ready)}}]
    with background_run(run, SMALL, workers=2, engine=APART, watchers=slow, checkpoint={"every": "2 steps"}) as it:
        it.wait_until(lambda state: state.saved_step and state.saved_step >= 2)
        agents_of(psutil.Process())[0].kill()
        it.wait_until(lambda state: sum(w.state == "dead" for w in state.workers.values()) == 2)
        ready.touch()
    outcome = it.outcome.result()
    assert_same(outcome, reference_receipt(run, SMALL))
    assert any(event.kind == "resumed" for event in it.events)


@pytest.mark.long
@pytest.mark.parametrize("where", ["file", "URL"])
def test_a_notice_to_all_machines_saves_and_stops_and_resume_goes_on(
    run,
    resume,
    job_dir,
    service,  # noqa: F811
    monkeypatch,
    where,
):
    """As a cloud tells it: nothing is saved before, and nothing is computed twice."""
    ready, file = job_dir / "ready", job_dir / "going"
    slow = [{"name": "delays.py:SlowSteps", "args": {"seconds": 0.2, "until": str(ready)}}]
    notice = {"notice": str(file) if where == "file" else f"{service}/going"}
    job = SMALL | {"steps": 600, "checkpoint": {"every": "never"}}
    with background_run(run, job, workers=2, engine=TWO_MACHINES | notice, watchers=slow) as it:
        it.wait_for_workers(2)
        it.wait_until(lambda state: state.step >= 3)
        with monkeypatch.context() as patch:
            file.touch()
            patch.setitem(MetadataService.answers, "/going", b'{"action": "terminate"}')
            assert it.outcome.result(300).status == "terminated"
        file.unlink()
    stopped_at = it.state.step
    ready.touch()
    outcome = resume(it.paths)
    assert_same(outcome, reference_receipt(run, job))
    assert outcome.receipt.deaths_survived == 0
    (resumed,) = [event for event in read_events(it.paths.events) if event.kind == "resumed"]
    assert resumed.step == stopped_at >= 3


def run_cli(*arguments, cwd):
    command = [sys.executable, "-c", "from shoal.cli import main; main()", *arguments]
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_event(events: Path, found, process):
    until = time.monotonic() + 300
    while time.monotonic() < until:
        if events.exists() and any(found(event) for event in read_events(events)):
            return
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.02)
    raise AssertionError("it did not happen")


@pytest.mark.long
@pytest.mark.parametrize("saves", ["through the driver", "to a URL"])
def test_a_killed_driver_takes_all_along_and_resume_goes_on(run, job_dir, tmp_path, saves):
    ready = job_dir / "ready"
    slow = [{"name": "delays.py:SlowSteps", "args": {"seconds": 1.0, "until": str(ready)}}]
    far = tmp_path / "far"
    checkpoint = {"every": "2 steps"} | ({"path": f"file://{far}"} if saves == "to a URL" else {})
    job = SMALL | {"workers": 2, "engine": TWO_MACHINES, "watchers": slow, "checkpoint": checkpoint}
    (job_dir / "job.yaml").write_text(yaml.safe_dump(job))
    paths = RunPaths(job_dir / "runs" / "mlp-1")
    with run_cli("run", "job.yaml", cwd=job_dir) as driver:
        wait_for_event(paths.events, lambda event: event.kind == "saved" and event.step >= 4, driver)
        others = psutil.Process(driver.pid).children(recursive=True)
        driver.kill()
        driver.stdout.read()
    _, alive = psutil.wait_procs(others, timeout=30)
    assert alive == []
    ready.touch()
    with run_cli("resume", "mlp-1", cwd=job_dir) as driver:
        said = driver.stdout.read()
    assert driver.returncode == 0, said
    receipt = json.loads(paths.receipt.read_text())
    assert receipt["weights_sha256"] == reference_receipt(run, SMALL).weights_sha256
    assert any(event.kind == "resumed" and event.step >= 4 for event in read_events(paths.events))
    assert far.exists() != paths.checkpoints.exists(), "checkpoints are at one place"
    assert far.exists() == (saves == "to a URL")


@pytest.mark.long
def test_a_run_can_grow_shrink_and_drain_without_the_directory(run, job_dir):
    ready = job_dir / "ready"
    slow = [{"name": "delays.py:SlowSteps", "args": {"seconds": 0.1, "until": str(ready)}}]
    job = LONGER
    with background_run(run, job, workers={"least": 1, "most": 4}, engine=TWO_MACHINES, watchers=slow) as it:
        it.wait_until(lambda state: len(state.training_workers) >= 1)
        commands.scale(it.paths, 3)
        it.wait_for_workers(3)
        commands.drain(it.paths, it.state.training_workers[0].name)
        commands.scale(it.paths, 1)
        it.wait_for_workers(1)
        ready.touch()
    assert_same(it.outcome.result(), reference_receipt(run, job))
    assert it.outcome.result().receipt.deaths_survived == 0


def test_a_job_for_other_machines_is_checked_on_this_one(job_dir, fork_server):
    job = make_job(SMALL | {"engine": APART}, base_dir=str(job_dir))
    assert run_probe("check", job, fork_server=fork_server)


SERVING = SMALL | {"sync": {"kind": "server", "servers": 2, "backups": 1}}


@pytest.mark.long
def test_servers_on_other_machines_give_the_same_bits_through_a_kill(run, job_dir):
    """Two servers and two workers on two machines that share nothing; a server and a worker are killed."""
    ready = job_dir / "ready"
    slow = [{"name": "delays.py:SlowSteps", "args": {"seconds": 0.1, "until": str(ready)}}]
    job = LONGER | {"sync": SERVING["sync"], "checkpoint": {"every": "50 steps"}}
    with background_run(run, job, workers=2, engine=TWO_MACHINES, watchers=slow) as it:
        it.wait_for_workers(2)
        it.wait_until(lambda state: len(state.serving_servers) == 2 and state.step >= 2)
        doomed = it.state.serving_servers[0]
        assert open_files_below(doomed.pid, it.paths.root) == []
        psutil.Process(doomed.pid).kill()
        it.wait_until(lambda state: any(s.state == "dead" for s in state.servers.values()))
        it.wait_until(lambda state: len(state.serving_servers) == 2)
        psutil.Process(it.state.training_workers[-1].pid).kill()
        it.wait_until(lambda state: any(w.state == "dead" for w in state.workers.values()))
        ready.touch()
    outcome = it.outcome.result()
    assert_same(outcome, reference_receipt(run, job))
    assert (outcome.receipt.server_deaths_survived, outcome.receipt.deaths_survived) == (1, 1)
    assert agents_of(psutil.Process()) == []


@pytest.mark.long
@pytest.mark.parametrize("kind", ["run", "file", "checkpoint"])
def test_weights_to_start_from_are_sent(run, job_dir, tmp_path_factory, kind):
    first = run(SMALL, checkpoint={"every": "8 steps"})
    assert first.status == "finished", first.error
    path = {
        "run": first.paths.root,
        "file": first.paths.model / "model.safetensors",
        "checkpoint": max(first.paths.checkpoints.glob("*/*.json")),
    }[kind]
    job = SMALL | {"init_from": {"path": str(path)}}
    outcome = run(job, workers=2, engine=TWO_MACHINES)
    assert_same(outcome, reference_receipt(run, job))
    assert outcome.receipt.init_from.path == str(path)
    assert outcome.receipt.weights_sha256 != first.receipt.weights_sha256


def test_weights_that_are_missing_are_told_before_anything_starts(run, job_dir):
    (job_dir / "empty").mkdir()
    with pytest.raises(ShoalError, match=r"SH501.*no weights here"):
        run(SMALL, engine=APART, init_from={"path": "empty/"})


@pytest.mark.long
def test_workers_and_servers_listen_in_the_range_of_ports(run, job_dir):
    first = free_ports(12)
    seen = {}

    def look(paths, event, state):
        if event.kind in ("worker_started", "server_started"):
            here = psutil.Process(event["pid"]).net_connections("tcp")
            seen[event.get("server") or event.who] = {one.laddr.port for one in here if one.status == "LISTEN"}

    network = {"ports": f"{first}-{first + 11}"}
    outcome = run(SERVING, look, workers=2, engine=APART, network=network)
    assert outcome.status == "finished", outcome.error
    assert len(seen) == 4
    assert all(len(ports) == 1 for ports in seen.values())
    assert set.union(*seen.values()) <= set(range(first, first + 12))


@pytest.mark.long
def test_workers_reach_the_driver_at_the_address_that_they_are_told(run, job_dir):
    """As behind a gateway: the driver is bound to another address, from which all is passed on."""
    port = free_ports(1)
    seen = set()

    def look(paths, event, state):
        if event.kind == "worker_started":
            seen.update(one.raddr for one in psutil.Process(event["pid"]).net_connections("tcp") if one.raddr)

    network = {"port": port, "advertise": "127.0.0.2"}
    with contextlib.closing(RecordingProxy(("127.0.0.1", port), listen=("127.0.0.2", port))):
        outcome = run(SMALL, look, workers=2, engine=TWO_MACHINES, network=network)
    assert_same(outcome, reference_receipt(run, SMALL))
    assert seen >= {("127.0.0.2", port)}
    assert ("127.0.0.1", port) not in seen


@pytest.mark.long
def test_a_copy_of_a_run_is_resumed_where_the_job_lies_elsewhere(run, job_dir, tmp_path):
    """As on another machine, which has the run and the job's directory at other paths."""
    ready = job_dir / "ready"
    slow = [{"name": "delays.py:SlowSteps", "args": {"seconds": 1.0, "until": str(ready)}}]
    job = SMALL | {"workers": 2, "engine": TWO_MACHINES, "watchers": slow, "checkpoint": {"every": "2 steps"}}
    (job_dir / "job.yaml").write_text(yaml.safe_dump(job))
    events = job_dir / "runs" / "mlp-1" / "events.jsonl"
    with run_cli("run", "job.yaml", cwd=job_dir) as driver:
        wait_for_event(events, lambda event: event.kind == "saved" and event.step >= 4, driver)
        driver.kill()
        driver.stdout.read()
    there = tmp_path / "there"
    shutil.copytree(job_dir, there)
    shutil.rmtree(job_dir / "runs")
    ready.touch()
    with run_cli("resume", "mlp-1", "--set", f"base_dir={there}", "--engine", "local", cwd=there) as driver:
        said = driver.stdout.read()
    assert driver.returncode == 0, said
    receipt = json.loads((there / "runs" / "mlp-1" / "receipt.json").read_text())
    assert receipt["weights_sha256"] == reference_receipt(run, SMALL).weights_sha256
