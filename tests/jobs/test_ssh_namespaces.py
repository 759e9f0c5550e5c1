"""Runs over hosts that share nothing but a network: namespaces with an address and an sshd each. The driver is on the
first, workers and servers on the others. Run by `make test-ssh`; needs root."""

import contextlib
import os
import sys
import time

import psutil
import pytest

from tests.conftest import MLP, living
from tests.fleet.ssh_server import SSHD, SshServer
from tests.jobs.fault_injection import reference_receipt
from tests.jobs.network_namespaces import namespace_network
from tests.jobs.spread_run import PATIENCE_S, SpreadRun, assert_same, command_of

pytestmark = [
    pytest.mark.ssh,
    pytest.mark.skipif(SSHD is None, reason="no sshd: tools/install_sshd.sh"),
    pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces"),
]
LANES = MLP | {"steps": 1500, "evaluate": {"every_steps": 500}, "checkpoint": {"every": "100 steps"}}
SHARDED = LANES | {"shard": "fsdp", "workers": 2, "steps": 400}
SERVING = LANES | {"sync": {"kind": "server", "servers": 2, "backups": 1}, "steps": 400}
PORT = 2222


@pytest.fixture
def spread(job_dir, tmp_path_factory):
    """Three hosts: the driver's, and two with an sshd. Nothing is left on them afterwards."""
    with namespace_network(3) as hosts, contextlib.ExitStack() as stack:
        server = SshServer(tmp_path_factory.mktemp("ssh"), PORT)
        addresses = {"n2": hosts[1].address, "n3": hosts[2].address}
        server.write(addresses)
        for name, host in zip(addresses, hosts[1:], strict=True):
            stack.enter_context(server.running(name, inside=host))
        engine = {
            "kind": "ssh",
            "hosts": [{"host": name, "seats": 2} for name in addresses],
            "python": sys.executable,
            "config": str(server.config),
        }
        yield SpreadRun(hosts, job_dir, engine)
        wait_for_no_agent(hosts[1:])


def wait_for_no_agent(hosts):
    until = time.monotonic() + PATIENCE_S
    while left := [pid for host in hosts for pid in host.pids() if "host_agent" in " ".join(command_of(pid))]:
        assert time.monotonic() < until, [command_of(pid) for pid in left]
        time.sleep(0.1)


def test_a_host_that_is_cut_off_is_fenced_also_when_it_comes_back(spread, run):
    """Its worker lives on behind the broken network. When the network is whole again, nobody listens to it, and it
    ends."""
    with spread.driven(LANES):
        spread.wait_for_workers(2)
        before = spread.pids()
        assert len({spread.host_of(pid).name for pid in before.values()}) == 2, "one worker on each host"
        cut, alone = sorted(spread.carriers())
        away = spread.host_of(before[cut])
        away.disconnect()
        spread.wait_until(lambda events: any(e.kind in ("evicted", "worker_died") for e in events))
        assert command_of(before[cut]), "it was declared dead, and lives"
        spread.wait_until(lambda events: alone in spread.carriers() and cut not in spread.carriers())
        away.reconnect()
        spread.wait_until(lambda events: not psutil.pid_exists(before[cut]))
        spread.wait_for_workers(2)
        assert cut not in spread.carriers(), "a seat is never given again"
        refused = [event["reason"] for event in spread.events() if event.kind == "refused"]
        assert any("is not its seat" in reason for reason in refused), refused
        receipt = spread.finish()
    assert_same(receipt, reference_receipt(run, LANES))
    assert receipt["deaths_survived"] == 1


def test_two_hosts_that_do_not_reach_each_other_are_survived(spread, run):
    """Both reach the driver. The run goes on while the network is parted."""
    with spread.driven(LANES):
        spread.wait_for_workers(2)
        one, other = spread.hosts[1:]
        before = spread.last_step()
        one.cut_from(other)
        spread.wait_until(lambda events: spread.last_step() > before + 10)
        one.reach_again(other)
        spread.wait_for_workers(2)
        receipt = spread.finish()
    assert_same(receipt, reference_receipt(run, LANES))


@pytest.mark.parametrize("job", [SHARDED, SERVING], ids=["fsdp", "servers"])
def test_shards_and_servers_over_two_hosts_survive_a_kill(spread, run, job):
    with spread.driven(job):
        spread.wait_for_workers(2)
        first = spread.pids()
        hosts = {spread.host_of(pid).name for name, pid in first.items() if name.startswith("worker")}
        assert len(hosts) == 2
        doomed = next(name for name in sorted(first) if name.startswith("server" if job is SERVING else "worker"))
        psutil.Process(first[doomed]).kill()
        spread.wait_until(lambda events: any(e.kind in ("worker_died", "server_died") for e in events))
        spread.wait_for_workers(2)
        receipt = spread.finish()
    assert receipt["deaths_survived"] + receipt["server_deaths_survived"] == 1
    if job is SERVING:
        assert_same(receipt, reference_receipt(run, job))
    else:  # shards add in another order than one worker
        assert receipt["weights_sha256"] == run(job, runs="calm").receipt.weights_sha256


def test_a_killed_driver_is_resumed_on_another_machine(spread, run):
    """Nothing of the first run is left. The second driver has another address, which agents and workers are told."""
    job = LANES | {"checkpoint": {"every": "2 steps"}}
    with spread.driven(job):
        spread.wait_until(lambda events: any(e.kind == "saved" and e.step >= 4 for e in events))
        first = spread.pids()
        spread.kill_driver()
        psutil.wait_procs(living(first.values()), timeout=PATIENCE_S)
        assert not [pid for pid in first.values() if psutil.pid_exists(pid)]
    other = spread.hosts[1]
    with spread.drive("resume", "mlp-1", "--set", f"network.listen={other.address}", on=other):
        spread.wait_until(lambda events: sum(e.kind == "run_started" for e in events) == 2)
        receipt = spread.finish()
    assert receipt["weights_sha256"] == reference_receipt(run, job).weights_sha256
    assert any(event.kind == "resumed" and event.step >= 4 for event in spread.events())
