"""Whole runs over a real sshd on loopback: the same bits as one undisturbed worker. Run by `make test-ssh`."""

import contextlib
import signal
import sys

import psutil
import pytest

from tests.conftest import MLP
from tests.fleet.ssh_server import SSHD, ssh_server
from tests.jobs.background_run import background_run
from tests.jobs.fault_injection import (
    assert_same,
    assert_token_is_hidden,
    fault_script,
    fired_faults,
    reference_receipt,
)
from tests.jobs.search.other_engine import assert_same_search

pytestmark = [pytest.mark.ssh, pytest.mark.skipif(SSHD is None, reason="no sshd: tools/install_sshd.sh")]
SMALL = MLP | {"steps": 400, "evaluate": {"every_steps": 100}, "checkpoint": {"every": "50 steps"}}
LONGER = SMALL | {"steps": 3000}  # ten minutes while steps are slow


@pytest.fixture
def engine(tmp_path_factory):
    with ssh_server(tmp_path_factory.mktemp("ssh")) as server:
        yield {"kind": "ssh", "hosts": ["n1", "n2"], "python": sys.executable, "config": str(server.config)}


def own_ssh(host):
    """The ssh processes of this test that are connected to a host."""
    children = psutil.Process().children(recursive=True)
    return [one for one in children if one.name() == "ssh" and host in one.cmdline()]


def agents():
    """Agents that sshd started: they are no children of this test."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        with contextlib.suppress(psutil.NoSuchProcess):
            is_agent = words[-1:] == ["shoal.fleet.agents.host_agent"] and words[0] == sys.executable
            if is_agent and process.parent().name().startswith("sshd"):
                found.append(process)
    return found


def wait_for_no_agent():
    """sshd reaps an agent a moment after it has ended."""
    _, alive = psutil.wait_procs(agents(), timeout=60)
    assert alive == []


def test_the_same_bits_through_a_kill_over_ssh(run, job_dir, engine):
    """The hosts stand in a file."""
    (job_dir / "hosts").write_text("n1 slots=1\nn2 slots=1\n")
    named = {name: value for name, value in engine.items() if name != "hosts"} | {"hostfile": "hosts"}
    faults = fault_script(job_dir, "kill worker 1 at step 7")
    outcome = run(SMALL, workers=2, engine=named, watchers=faults)
    assert fired_faults(job_dir) == {"kill worker 1 at step 7"}
    assert_same(outcome, reference_receipt(run, SMALL))
    wait_for_no_agent()


def test_a_search_on_ssh_decides_and_finds_the_same(job_dir, fork_server, engine):
    assert_same_search(engine, job_dir, fork_server)
    wait_for_no_agent()


@pytest.mark.parametrize("killed", ["connection", "agent"])
def test_a_lost_host_ends_its_workers_and_the_others_go_on(run, job_dir, engine, killed):
    ready = job_dir / "ready"
    slow = [{"name": "delays.py:SlowSteps", "args": {"seconds": 0.2, "until": str(ready)}}]
    with background_run(run, LONGER, workers=2, engine=engine, watchers=slow) as it:
        it.wait_for_workers(2)
        assert_token_is_hidden(it.paths)
        (own_ssh("n1") if killed == "connection" else agents())[0].kill()
        it.wait_until(lambda state: any(w.state == "dead" for w in state.workers.values()))
        it.wait_for_workers(2)
        ready.touch()
    outcome = it.outcome.result()
    assert_same(outcome, reference_receipt(run, LONGER))
    assert outcome.receipt.deaths_survived == 1
    wait_for_no_agent()


def test_a_host_that_is_taken_away_is_a_planned_leave(run, job_dir, engine):
    ready = job_dir / "ready"
    slow = [{"name": "delays.py:SlowSteps", "args": {"seconds": 0.2, "until": str(ready)}}]
    with background_run(run, LONGER, workers=2, engine=engine, watchers=slow) as it:
        it.wait_for_workers(2)
        agents()[0].send_signal(signal.SIGTERM)
        it.wait_until(lambda state: any(w.state == "left" for w in state.workers.values()))
        ready.touch()
    outcome = it.outcome.result()
    assert_same(outcome, reference_receipt(run, LONGER))
    assert outcome.receipt.deaths_survived == 0


def test_a_driver_that_the_hosts_cannot_reach_is_told(run, engine):
    outcome = run(SMALL, engine=engine, network={"advertise": "127.0.0.2", "port": 1 + 1023})
    assert outcome.status == "failed"
    assert "cannot reach the driver at 127.0.0.2:1024" in str(outcome.error)


@pytest.mark.parametrize("host", ["stranger", "no-such-host.invalid"])
def test_a_host_that_cannot_be_used_fails_the_run_before_its_first_step(run, engine, host):
    outcome = run(SMALL, engine=engine | {"hosts": ["n1", host]}, workers=2)
    assert outcome.status == "failed"
    assert outcome.error.code in ("SH651", "SH652")
    wait_for_no_agent()
