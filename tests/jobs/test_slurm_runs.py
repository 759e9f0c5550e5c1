"""Whole runs over a real Slurm, whose nodes are in network namespaces: the same bits as one undisturbed worker. Run by
`make test-slurm`."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
import yaml

from shoal.events import read_events
from shoal.spec.run_paths import RunPaths
from tests.conftest import MLP
from tests.fleet.engine_contract import kill_above
from tests.fleet.slurm_cluster import SLURM, slurm_network
from tests.jobs.background_run import background_run
from tests.jobs.fault_injection import assert_same, assert_token_is_hidden, reference_receipt
from tests.jobs.network_namespaces import THIS_ADDRESS
from tests.jobs.search.other_engine import assert_same_search

is_root = os.getuid() == 0
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(not (SLURM and is_root), reason="needs root and Slurm: tools/install_slurm.sh"),
]
NETWORK = {"listen": THIS_ADDRESS}
SMALL = MLP | {"steps": 400, "evaluate": {"every_steps": 100}, "checkpoint": {"every": "50 steps"}, "network": NETWORK}
LONGER = SMALL | {"steps": 3000}  # ten minutes while steps are slow
ENGINE = {"kind": "slurm"}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with slurm_network(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture
def cluster(slurm, monkeypatch):
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    yield slurm
    slurm.wait_for(lambda: not slurm.active_jobs() and not agents(slurm), "jobs or agents are left")


def agents(cluster):
    """Agents on the nodes of this cluster."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error):
            is_agent = (process.info["cmdline"] or [])[-1:] == ["shoal.fleet.agents.host_agent"]
            if is_agent and process.environ().get("SLURM_CONF") == cluster.environment["SLURM_CONF"]:
                found.append(process)
    return found


def slow(job_dir):
    """Steps are slow until the file `ready` is there."""
    return [{"name": "delays.py:SlowSteps", "args": {"seconds": 0.2, "until": str(job_dir / "ready")}}]


@pytest.mark.parametrize("killed", ["worker", "agent"])
def test_the_same_bits_through_a_kill_with_a_job_per_worker(run, job_dir, cluster, killed):
    with background_run(run, LONGER, workers=2, engine=ENGINE, watchers=slow(job_dir)) as it:
        it.wait_for_workers(2)
        logs = [file.read_text(errors="replace") for file in (cluster.root / "log").iterdir()]
        assert_token_is_hidden(it.paths, cluster.run("scontrol", "--details", "show", "job"), *logs)
        jobs = cluster.active_jobs()
        kill_above(it.state.training_workers[-1].pid, killed)
        it.wait_until(lambda state: any(w.state == "dead" for w in state.workers.values()))
        it.wait_for_workers(2)
        if killed == "worker":
            assert cluster.active_jobs() == jobs  # the job of the dead worker is used again
        (job_dir / "ready").touch()
    outcome = it.outcome.result()
    assert_same(outcome, reference_receipt(run, LONGER))
    assert outcome.receipt.deaths_survived == 1


def test_a_search_on_slurm_decides_and_finds_the_same(job_dir, fork_server, cluster):
    assert_same_search(ENGINE, job_dir, fork_server, network=NETWORK)


def test_a_cancelled_job_is_a_planned_leave_and_is_replaced(run, job_dir, cluster):
    with background_run(run, LONGER, workers=2, engine=ENGINE, watchers=slow(job_dir)) as it:
        it.wait_for_workers(2)
        job = cluster.active_jobs()[0].split()[0]
        cluster.run("scancel", "--signal=TERM", job)
        it.wait_until(lambda state: any(w.state == "left" for w in state.workers.values()))
        it.wait_for_workers(2)
        (job_dir / "ready").touch()
    outcome = it.outcome.result()
    assert_same(outcome, reference_receipt(run, LONGER))
    assert outcome.receipt.deaths_survived == 0


def test_a_crashed_node_is_survived_by_the_others(run, job_dir, cluster):
    options = {"options": ["--exclusive"]}
    with background_run(run, LONGER, workers=2, engine=ENGINE | options, watchers=slow(job_dir)) as it:
        it.wait_for_workers(2)
        node = cluster.run("squeue", "--noheader", "--format=%N").split()[0]
        cluster.kill_node(node)
        it.wait_until(lambda state: any(w.state == "dead" for w in state.workers.values()))
        it.wait_for_workers(2)
        cluster.start_node(node)
        (job_dir / "ready").touch()
    outcome = it.outcome.result()
    assert_same(outcome, reference_receipt(run, LONGER))
    assert outcome.receipt.deaths_survived == 1


def test_a_node_that_is_cut_off_is_survived_by_the_others(run, job_dir, cluster):
    """Its worker lives on behind the broken network, is fenced, and ends."""
    exclusive = ENGINE | {"options": ["--exclusive"]}
    with background_run(run, LONGER, workers=2, engine=exclusive, watchers=slow(job_dir)) as it:
        it.wait_for_workers(2)
        node = cluster.run("squeue", "--noheader", "--format=%N").split()[0]
        (lost,) = [one for one in it.state.training_workers if one.pid in cluster.hosts[node].pids()]
        cluster.hosts[node].disconnect()
        try:
            it.wait_until(lambda state: state.workers[lost.name].state == "dead")
            it.wait_for_workers(2)
            assert psutil.pid_exists(lost.pid), "it was declared dead, and lives"
        finally:
            cluster.hosts[node].reconnect()
        cluster.wait_for(lambda: not psutil.pid_exists(lost.pid), "it trains on")
        assert lost.name not in [one.name for one in it.state.training_workers]
        (job_dir / "ready").touch()
    outcome = it.outcome.result()
    assert_same(outcome, reference_receipt(run, LONGER))
    assert outcome.receipt.deaths_survived == 1


def test_a_worker_starts_while_another_waits_and_a_run_that_ends_withdraws_it(run, job_dir, cluster):
    """The cluster has room for one: the run neither waits for the second nor leaves its request behind."""
    exclusive = ENGINE | {"options": ["--exclusive", "--exclude=n1,n2"]}
    outcome = run(SMALL, workers=2, engine=exclusive)
    assert_same(outcome, reference_receipt(run, SMALL))
    assert outcome.receipt.deaths_survived == 0


def test_preemption_of_all_saves_and_the_run_goes_on_when_there_is_room(run, job_dir, cluster):
    engine = ENGINE | {"options": ["--exclusive"]}
    job = LONGER | {"checkpoint": {"every": "never"}}
    with background_run(run, job, workers=3, engine=engine, watchers=slow(job_dir)) as it:
        it.wait_for_workers(3)
        it.wait_until(lambda state: state.step >= 3)
        urgent = cluster.run(
            "sbatch", "--parsable", "--partition=urgent", "--nodes=3", "--exclusive", "--wrap=sleep 600"
        )
        it.wait_until(lambda state: sum(w.state == "left" for w in state.workers.values()) == 3)
        cluster.run("scancel", urgent)
        it.wait_for_workers(1)
        (job_dir / "ready").touch()
    outcome = it.outcome.result()
    assert_same(outcome, reference_receipt(run, job))
    assert outcome.receipt.deaths_survived == 0
    assert any(event.kind == "resumed" and event.step >= 3 for event in it.events)


SCRIPT = """#!/bin/sh
#SBATCH --nodes=2 --exclusive --no-kill --open-mode=append --output={out} {options}
exec {python} -c 'from shoal.cli import main; main()' {words}
"""


OWN = "$(hostname -I)"


def submit(cluster, job_dir, words, *, options=""):
    script = job_dir / "job.sh"
    script.write_text(SCRIPT.format(out=job_dir / "out.txt", options=options, python=sys.executable, words=words))
    return cluster.run("sbatch", "--parsable", f"--chdir={job_dir}", str(script))


def wait_for_event(cluster, paths, found):
    cluster.wait_for(
        lambda: paths.events.exists() and any(found(event) for event in read_events(paths.events)), "it did not happen"
    )


@pytest.mark.parametrize("limit", ["", "--time=3 --signal=TERM@60"], ids=["by hand", "time limit"])
def test_an_allocation_that_ends_saves_and_stops_and_resume_goes_on(run, job_dir, cluster, limit):
    """`shoal run --engine slurm` in a batch script. Slurm sends TERM to all steps: when it is told to, or one to two
    minutes before the time limit."""
    job = SMALL | {"workers": 2, "watchers": slow(job_dir), "checkpoint": {"every": "never"}}
    job |= {"steps": 3000} if limit else {}  # ten minutes while steps are slow
    (job_dir / "job.yaml").write_text(yaml.safe_dump(job))
    paths = RunPaths(job_dir / "runs" / "mlp-1")
    number = submit(cluster, job_dir, f"run job.yaml --engine slurm --listen {OWN}", options=limit)
    wait_for_event(cluster, paths, lambda event: event.kind == "step" and event.step >= 3)
    if not limit:
        cluster.run("scancel", "--signal=TERM", number)
    cluster.wait_for(lambda: not cluster.active_jobs(), (job_dir / "out.txt").read_text())
    ended = [event for event in read_events(paths.events) if event.kind == "run_ended"]
    assert [event["status"] for event in ended] == ["terminated"]
    (job_dir / "ready").touch()
    submit(cluster, job_dir, f"resume mlp-1 --set network.listen={OWN}")
    cluster.wait_for(paths.receipt.exists, (job_dir / "out.txt").read_text())
    receipt = json.loads(paths.receipt.read_text())
    assert receipt["weights_sha256"] == reference_receipt(run, job).weights_sha256
    assert receipt["deaths_survived"] == 0


def test_a_killed_driver_takes_all_along_and_resume_goes_on(run, job_dir, cluster):
    job = SMALL | {"workers": 2, "engine": ENGINE, "watchers": slow(job_dir), "checkpoint": {"every": "2 steps"}}
    (job_dir / "job.yaml").write_text(yaml.safe_dump(job))
    paths = RunPaths(job_dir / "runs" / "mlp-1")
    command = [sys.executable, "-c", "from shoal.cli import main; main()"]
    with subprocess.Popen([*command, "run", "job.yaml", "-q"], cwd=job_dir) as driver:
        wait_for_event(cluster, paths, lambda event: event.kind == "saved" and event.step >= 4)
        driver.send_signal(signal.SIGKILL)
    cluster.wait_for(lambda: not cluster.active_jobs() and not agents(cluster), "jobs outlive their driver")
    (job_dir / "ready").touch()
    said = subprocess.run([*command, "resume", "mlp-1", "-q"], cwd=job_dir, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout + said.stderr
    receipt = json.loads(paths.receipt.read_text())
    assert receipt["weights_sha256"] == reference_receipt(run, SMALL).weights_sha256


def test_what_slurm_refuses_fails_the_run_before_its_first_step(run, cluster):
    outcome = run(SMALL, engine=ENGINE | {"options": ["--partition=none"]}, workers=2)
    assert outcome.status == "failed"
    assert outcome.error.code == "SH656"
