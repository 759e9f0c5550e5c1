"""A planned run on two hosts with a slow link between: what is measured there counts, and who does not help goes."""

import json
import os
import signal
import time

import pytest
import yaml

from shoal.events import read_events
from shoal.spec.run_paths import RunPaths
from tests.conftest import CNN
from tests.jobs.fault_injection import time_limit
from tests.jobs.network_namespaces import namespace_network

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces")]
JOB = CNN | {
    "sync": "auto",
    "workers": 1,
    "lanes": 4,
    "steps": 10**6,
    "schedule": None,
    "evaluate": {"every_steps": 10**6},
}


class PlannedRun:
    """A run that plans by itself on the first host."""

    def __init__(self, host, job_dir):
        self.job_dir = job_dir
        (job_dir / "job.yaml").write_text(yaml.safe_dump(JOB | {"network": {"listen": host.address}}))
        words = ["-m", "shoal", "run", str(job_dir / "job.yaml"), "--json", "--runs", str(job_dir / "runs")]
        self.log = job_dir / "driver.log"
        self.driver = host.python(*words, log=self.log, env=os.environ)
        self.paths = RunPaths.at(job_dir / "runs" / "cnn-1")

    def join(self, host):
        known = json.loads(self.paths.driver_address.read_text())
        (scratch := self.job_dir / "agent").mkdir()
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

    def until(self, kind):
        """The newest of this kind, when there is one; the test's clock ends the wait."""
        while True:
            events = list(read_events(self.paths.events)) if self.paths.events.is_file() else []
            if found := [event for event in events if event.kind == kind]:
                return found[-1]
            assert self.driver.poll() is None, self.log.read_text()[-2000:]
            time.sleep(0.05)


def test_a_host_behind_a_slow_link_is_measured_and_let_go(job_dir):
    with time_limit(120), namespace_network(2) as hosts:
        run = PlannedRun(hosts[0], job_dir)
        run.until("step")
        for host in hosts:
            host.limit_bandwidth(1)
        agent = run.join(hosts[1])
        link = run.until("link_measured")
        assert link.who == "worker-1"
        assert 0.5e5 < link["send_bytes_s"] < 2e5
        assert 0.5e5 < link["receive_bytes_s"] < 2e5
        run.until("left")
        again = run.until("replan")
        assert again["choice"]["hosts"] == 2
        assert (again["moves"]["workers"], again["moves"]["hosts"]) == (1, 1)
        assert again["truth"]["step_s"] > 2 * again["expected"]["step_s"]
        assert agent.wait() == 0
        run.driver.send_signal(signal.SIGTERM)
        assert run.driver.wait() == 143
