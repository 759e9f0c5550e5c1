"""A run over hosts that share nothing but a network: its driver is a process on one of them."""

import contextlib
import json
import os
import subprocess
import sys
import time

import psutil
import yaml

from shoal.events import read_events
from shoal.spec.run_paths import RunPaths

COMMAND = [sys.executable, "-c", "from shoal.cli import main; main()"]
PATIENCE_S = 240


class SpreadRun:
    """A run whose driver is on the first host, as the command line starts it."""

    def __init__(self, hosts, job_dir, engine):
        self.hosts, self.job_dir, self.engine = hosts, job_dir, engine
        self.ready = job_dir / "ready"
        self.paths = RunPaths.at(job_dir / "runs" / "mlp-1")
        self._driver = None

    @contextlib.contextmanager
    def driven(self, job):
        """Steps are slow until `finish` is called."""
        slow = {"name": "delays.py:SlowSteps", "args": {"seconds": 1.0, "until": str(self.ready)}}
        network = {"listen": self.hosts[0].address} | job.get("network", {})
        whole = job | {"workers": 2, "engine": self.engine, "watchers": [slow], "network": network}
        (self.job_dir / "job.yaml").write_text(yaml.safe_dump(whole))
        with self.drive("run", "job.yaml"):
            yield self

    @contextlib.contextmanager
    def drive(self, *words, on=None):
        log = self.job_dir / "driver.log"
        self._driver = (on or self.hosts[0]).python(
            *COMMAND[1:], *words, "-q", log=log, env=os.environ, cwd=self.job_dir
        )
        try:
            yield
        finally:
            self._driver.terminate()
            self._driver.wait()

    def events(self):
        return list(read_events(self.paths.events)) if self.paths.events.is_file() else []

    def wait_until(self, holds):
        until = time.monotonic() + PATIENCE_S
        while not holds(events := self.events()):
            assert self._driver.poll() is None, (self.job_dir / "driver.log").read_text()[-2000:]
            assert time.monotonic() < until, [event.kind for event in events][-30:]
            time.sleep(0.1)
        return events

    def carriers(self):
        views = [event for event in self.events() if event.kind == "view" and event.get("carries")]
        return set(views[-1]["carries"]) if views else set()

    def wait_for_workers(self, count):
        self.wait_until(lambda events: len(self.carriers()) == count and self.trains())

    def trains(self):
        """The workers of the last view have committed a step in it."""
        events = self.events()
        last = max(n for n, event in enumerate(events) if event.kind == "view" and event.get("carries"))
        return any(event.kind == "step" for event in events[last:])

    def last_step(self):
        return max((event.step for event in self.events() if event.kind == "step"), default=0)

    def pids(self):
        """Of workers and servers, by name."""
        started = [event for event in self.events() if event.kind in ("worker_started", "server_started")]
        return {event.get("server") or event.who: event["pid"] for event in started}

    def host_of(self, pid):
        found = subprocess.run(["ip", "netns", "identify", str(pid)], capture_output=True, text=True, check=True)
        return next(host for host in self.hosts if host.name == found.stdout.strip())

    def kill_driver(self):
        self._driver.kill()
        self._driver.wait()

    def finish(self):
        self.ready.touch()
        assert self._driver.wait() == 0, (self.job_dir / "driver.log").read_text()[-2000:]
        return json.loads(self.paths.receipt.read_text())


def command_of(pid):
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).cmdline()
    return []


def assert_same(receipt, undisturbed):
    for name in ("weights_sha256", "state_sha256", "samples_seen", "metrics", "best"):
        assert receipt[name] == getattr(undisturbed, name), name
