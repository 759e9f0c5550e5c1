"""One run on three hosts, of which one is cut off and comes back."""

import json
import os
import time

import pytest
import yaml

from shoal.events import read_events
from shoal.spec.run_paths import RunPaths
from tests.conftest import CNN
from tests.jobs.fault_injection import reference_receipt, time_limit
from tests.jobs.network_namespaces import namespace_network

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces")]
JOB = CNN | {"lanes": 8, "steps": 400, "evaluate": {"every_steps": 100, "batch_size": 16}}


@pytest.fixture
def hosts():
    with time_limit(150), namespace_network(3) as made:
        yield made


class MultiHostRun:
    """A run with two workers on the first host and one on each of the others."""

    def __init__(self, hosts, job_dir, *, step_delay_s):
        self.hosts = hosts
        self.job_dir = job_dir
        self.stop_file = job_dir / "enough"
        slow_steps = {"name": "delays.py:SlowSteps", "args": {"seconds": step_delay_s, "until": str(self.stop_file)}}
        job = JOB | {"workers": 2, "network": {"listen": hosts[0].address}, "watchers": [slow_steps]}
        (job_dir / "job.yaml").write_text(yaml.safe_dump(job))
        words = ["-m", "shoal", "run", str(job_dir / "job.yaml"), "--json", "--runs", str(job_dir / "runs")]
        self.log = job_dir / "driver.log"
        self.driver = hosts[0].python(*words, log=self.log, env=os.environ)
        self.paths = RunPaths.at(job_dir / "runs" / "cnn-1")
        self.wait_until(lambda events: any(e.kind == "run_started" for e in events))
        self.agents = [self.join(host) for host in hosts[1:]]
        self.wait_until(lambda events: self.has_carriers(4))

    def join(self, host):
        known = json.loads(self.paths.driver_address.read_text())
        scratch = self.job_dir / f"agent-{host.name}"
        scratch.mkdir()
        words = [
            "-m",
            "shoal.train.worker",
            "--join",
            f"{known['host']}:{known['port']}",
            "--dir",
            str(self.job_dir),
            "--trust-code",
        ]
        environment = os.environ | {"SHOAL_TOKEN": known["token"]}
        return host.python(*words, "--run", str(scratch), log=scratch / "log", env=environment)

    def events(self):
        return list(read_events(self.paths.events)) if self.paths.events.is_file() else []

    def wait_until(self, holds):
        """Waits; the fixture's clock ends it."""
        while not holds(events := self.events()):
            assert self.driver.poll() is None, self.log.read_text()[-2000:]
            time.sleep(0.05)
        return events

    def has_carriers(self, number):
        views = [e for e in self.events() if e.kind == "view" and e.get("carries")]
        return bool(views) and len(views[-1]["carries"]) == number

    def finish(self):
        self.stop_file.touch()
        assert self.driver.wait() == 0, self.log.read_text()[-2000:]
        return json.loads(self.paths.receipt.read_text())


def assert_same(receipt, undisturbed):
    for name in ("weights_sha256", "state_sha256", "samples_seen", "metrics", "best"):
        assert receipt[name] == getattr(undisturbed, name), name


def test_three_hosts_give_the_bits_of_one(hosts, job_dir, run):
    spread = MultiHostRun(hosts, job_dir, step_delay_s=0.2)
    receipt = spread.finish()
    assert_same(receipt, reference_receipt(run, JOB))
    measured = {event.who: event for event in spread.events() if event.kind == "link_measured"}
    assert set(measured) == {"worker-2", "worker-3"}, "those who came from elsewhere"
    assert all(0 < event["latency_s"] < 1 and event["send_bytes_s"] > 1e5 for event in measured.values())
    assert receipt["workers"] == 4
    assert [agent.wait() for agent in spread.agents] == [0, 0]


def test_a_host_that_is_cut_off_comes_back_under_another_seat(hosts, job_dir, run):
    spread = MultiHostRun(hosts, job_dir, step_delay_s=0.2)
    before = len(spread.events())
    cut_t = time.time()
    hosts[2].disconnect()
    events = spread.wait_until(lambda events: any(e.kind == "evicted" for e in events[before:]))
    (row,) = [e for e in events if e.kind == "evicted"]
    assert row.t - cut_t < 5
    spread.wait_until(lambda events: spread.has_carriers(3))
    step = max(e.step or 0 for e in spread.events())
    spread.wait_until(lambda events: max(e.step or 0 for e in events) > step + 3)
    hosts[2].reconnect()
    spread.wait_until(lambda events: spread.has_carriers(4))
    last = [e for e in spread.events() if e.kind == "view" and e.get("carries")][-1]
    assert row["worker"] not in last["carries"], "a seat is never used again"
    receipt = spread.finish()
    assert_same(receipt, reference_receipt(run, JOB))
    assert [agent.wait() for agent in spread.agents] == [0, 0]
