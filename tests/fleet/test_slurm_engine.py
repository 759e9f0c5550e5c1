"""The engine over a real Slurm on this machine. Run by `make test-slurm`."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest

from shoal.fleet.engines.make import slurm_engine
from shoal.fleet.forkserver import ForkServer
from shoal.spec.engine import SlurmEngineConfig
from shoal.spec.run_paths import RunPaths
from tests.fleet.engine_contract import AgentContract, collect_exits, launch, wait_exits, wait_ready
from tests.fleet.slurm_cluster import SLURM, slurm_network
from tests.fleet.test_agent_engine import ENTRY, pids, wait_gone

is_root = os.getuid() == 0
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(not (SLURM and is_root), reason="needs root and Slurm: tools/install_slurm.sh"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm_network(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture
def outside(cluster, monkeypatch):
    """This process finds the cluster, and is in no allocation. Nothing is left in the queue afterwards."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    yield cluster
    cluster.wait_for(lambda: not cluster.active_jobs(), "jobs are left")


@contextlib.contextmanager
def allocation(cluster, monkeypatch, *options):
    """This process is in an allocation, as Slurm's variables say it."""
    said = subprocess.run(
        ["salloc", "--no-shell", "--no-kill", *options],
        env=cluster.environment,
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    job = re.search(r"job allocation (\d+)", said)[1]
    nodes, cores = cluster.run("squeue", f"--jobs={job}", "--noheader", "--format=%N %C").split()
    count = len(cluster.run("scontrol", "show", "hostnames", nodes).split())
    with monkeypatch.context() as patch:
        patch.setenv("SLURM_JOB_ID", job)
        patch.setenv("SLURM_JOB_NODELIST", nodes)
        patch.setenv("SLURM_JOB_CPUS_PER_NODE", f"{int(cores) // count}(x{count})")
        try:
            yield job
        finally:
            cluster.run("scancel", job, check=False)


@pytest.fixture
def inside(outside, monkeypatch):
    with allocation(outside, monkeypatch, "--nodes=2", "--exclusive") as job:
        yield job


@pytest.fixture
def make(outside, tmp_path):
    (tmp_path / "seat_entry.py").write_text(ENTRY)
    made = []
    with ForkServer(os.environ | {"OMP_NUM_THREADS": "1"}, ["seat_entry"], at_once=False) as fork_server:
        os.environ["PYTHONPATH"] = str(tmp_path)

        def make(**fields):
            config = SlurmEngineConfig(kind="slurm", **fields)
            made.append(slurm_engine(config, RunPaths(tmp_path), fork_server))
            return made[-1]

        yield make
        for engine in made:
            engine.close()


@pytest.fixture(autouse=True)
def _keep_path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "")


class TestSteps(AgentContract):
    """Inside an allocation."""

    outlives_driver = False

    @pytest.fixture
    def make_engine(self, inside, make):
        return make


class TestJobs(AgentContract):
    """Outside of one: a job for each seat."""

    outlives_driver = False

    @pytest.fixture
    def make_engine(self, make):
        return make


def wait_lost(engine):
    """srun may not notice what happened, and then the agent does not answer pings."""
    (one,) = wait_exits(engine, 1) or wait_exits(engine, 1) or wait_exits(engine, 1)
    return one


def test_a_killed_srun_leaves_nothing_behind(inside, make, tmp_path):
    engine = make()
    engine.start([launch(0, "wait"), launch(1, "wait")])
    wait_ready(tmp_path, 0, 1, engine=engine)
    host, doomed = next(iter(engine.agent_pids().items()))
    os.kill(doomed, signal.SIGKILL)
    (one,) = wait_exits(engine, 1)
    assert one.reason.startswith(f"the loss of host {host}")
    wait_gone(*pids(tmp_path, one.seat))
    assert engine.running() == [1 - one.seat]
    engine.start([launch(5, "0")])  # its node is used again
    assert collect_exits(engine, 1) == {5: 0}
    engine.close()
    wait_gone(*pids(tmp_path, 0, 1))


def test_a_killed_step_leaves_nothing_behind(inside, make, tmp_path):
    """The processes of a killed slurmstepd live on as far as Slurm can see; srun ends with 0."""
    engine = make()
    engine.start([launch(0, "wait", node=engine.capacity()[0].name)])
    wait_ready(tmp_path, 0, engine=engine)
    (pid,) = pids(tmp_path, 0)
    (step,) = [one for one in psutil.Process(pid).parents() if one.name().startswith("slurmstepd")]
    step.kill()
    wait_gone(pid)
    assert wait_lost(engine).code is None
    engine.start([launch(1, "7")])
    assert collect_exits(engine, 1) == {1: 7}


def test_a_node_that_crashes_ends_its_seats_and_no_others(outside, make, tmp_path, monkeypatch):
    with allocation(outside, monkeypatch, "--nodelist=n1,n2", "--exclusive"):
        engine = make()
        engine.start([launch(0, "wait", node="n1"), launch(1, "wait", node="n2")])
        wait_ready(tmp_path, 0, 1, engine=engine)
        outside.kill_node("n2")
        one = wait_lost(engine)
        outside.start_node("n2")
        assert (one.seat, one.code) == (1, None)
        wait_gone(*pids(tmp_path, 1))
        assert engine.running() == [0]
        engine.close()
    outside.wait_for(lambda: "idle 3" in outside.run("sinfo", "--noheader", "--format=%T %D"), "n2 is not back")


def test_a_waiting_job_is_told_and_withdrawn(outside, make):
    engine = make(options=["--begin=now+1hour"])
    engine.start([launch(0, "0"), launch(1, "0")])
    outside.wait_for(lambda: engine.poll(0.1) == [] and len(outside.active_jobs()) == 2, "no jobs were submitted")
    assert engine.waiting() == engine.running() == [0, 1]
    engine.stop([1])
    assert collect_exits(engine, 1) == {1: -9}
    outside.wait_for(lambda: engine.poll(0.1) == [] and len(outside.active_jobs()) == 1, "it is not withdrawn")
    assert engine.waiting() == [0]


def test_a_job_is_used_again_and_then_given_back(outside, make, tmp_path):
    engine = make()
    engine.start([launch(0, "wait")])
    wait_ready(tmp_path, 0, engine=engine)
    (job,) = outside.active_jobs()
    engine.stop([0])
    assert collect_exits(engine, 1) == {0: -9}
    engine.start([launch(1, "0")])
    assert collect_exits(engine, 1) == {1: 0}
    assert all(line.split()[0] == job.split()[0] for line in outside.active_jobs())
    outside.wait_for(lambda: engine.poll(0.1) == [] and not outside.active_jobs(), "it is not given back")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"options": ["--partition=none"]}, "SH656.*invalid partition"),
        ({"options": ["--no-such-option"]}, "SH656.*unrecognized option"),
        ({"python": "/no/such/python"}, "SH653.*/no/such/python"),
        ({"python": "/usr/bin/false"}, "SH656.*exit code 1"),
    ],
)
def test_what_slurm_cannot_start_is_told(make, fields, told):
    engine = make(**fields)
    engine.start([launch(0, "0"), launch(1, "0")])
    found = wait_exits(engine, 2)
    assert [one.code for one in found] == [1, 1]
    assert re.search(told, str(found[0].start_error), re.DOTALL), str(found[0].start_error)


DRIVER = """
    import os, sys
    from pathlib import Path
    from shoal.fleet.engines.make import slurm_engine
    from shoal.fleet.forkserver import ForkServer
    from shoal.spec.engine import SlurmEngineConfig
    from shoal.spec.run_paths import RunPaths
    from tests.fleet.engine_contract import launch
    config = SlurmEngineConfig(kind="slurm", options=sys.argv[2:])
    fork_server = ForkServer(os.environ, ["seat_entry"], at_once=False)
    engine = slurm_engine(config, RunPaths(Path(sys.argv[1])), fork_server)
    engine.start([launch(0, "wait"), launch(1, "wait")])
    while True:
        engine.poll(1)
"""


@pytest.mark.parametrize("options", [[], ["--begin=now+1hour"]], ids=["running", "waiting"])
def test_nothing_outlives_a_driver_that_is_killed(outside, tmp_path, options):
    (tmp_path / "seat_entry.py").write_text(ENTRY)
    command = [sys.executable, "-c", textwrap.dedent(DRIVER), str(tmp_path), *options]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": f"{tmp_path}:{os.getcwd()}"}) as driver:
        outside.wait_for(lambda: len(outside.active_jobs()) == 2, "no jobs were submitted")
        if not options:
            wait_ready(tmp_path, 0, 1)
        driver.kill()
    outside.wait_for(lambda: not outside.active_jobs(), "jobs outlive their driver")
    wait_gone(*([] if options else pids(tmp_path, 0, 1)))
