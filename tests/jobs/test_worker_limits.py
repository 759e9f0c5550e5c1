"""Whole runs under limits that the kernel holds (cgroup v2). `make test-limits` brings such a kernel."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from shoal.events import read_events
from tests.conftest import MLP

pytestmark = pytest.mark.limits

LIMITS = {"memory": "1 GB", "cpus": 1}
PATIENCE_S = 300


@pytest.fixture(autouse=True)
def _kernel_with_cgroup2():
    assert Path("/sys/fs/cgroup/cgroup.controllers").is_file(), "`make test-limits` brings a kernel with cgroup v2"


def groups():
    """Those that workers have made: the tests are in the outermost group."""
    return sorted(Path("/sys/fs/cgroup").glob("shoal-*"))


def wait_until_no_groups():
    until = time.monotonic() + PATIENCE_S
    while groups():
        assert time.monotonic() < until, groups()
        time.sleep(0.05)


def test_a_worker_out_of_memory_is_named_before_and_after_and_the_weights_are_the_same(run, job_dir):
    events = job_dir / "runs" / "mlp-1" / "events.jsonl"
    fault = {"name": "faults.py:FillMemory", "args": {"step": 20, "events": str(events), "marks": str(job_dir)}}
    seen = set()
    done = run(
        MLP, steps=40, limits=LIMITS, watchers=[fault], elastic={"restarts": 1}, look=lambda *_: seen.update(groups())
    )
    assert done.paths.events == events
    assert len(seen) == 2, "one for each start of the worker"
    told = [event for event in read_events(events) if event.kind in ("note", "worker_died")]
    texts = [event.get("message", "") or event["reason"] for event in told]
    both = [
        "limits.memory bounds what the worker uses to 1 GB, by cgroup v2",
        "limits.cpus bounds the worker to 1 cores, by cgroup v2",
    ]
    assert texts[:2] == both
    assert texts[2].startswith("worker-0 is about to run out of memory: it uses ")
    assert texts[3] == "SIGKILL (the kernel's out-of-memory killer was at work)"
    assert texts[4].startswith("worker-0 was killed: when it told last, it used ")
    assert texts[5:7] == both
    assert done.receipt.weights_sha256 == run(MLP, steps=40).receipt.weights_sha256
    wait_until_no_groups()


def test_no_group_is_left_of_a_run_whose_driver_is_killed(job_dir):
    job = MLP | {"workers": 2, "steps": 10**6, "limits": LIMITS, "elastic": {"patience_s": 1}}
    (job_dir / "job.yaml").write_text(yaml.safe_dump(job))
    words = ["run", "job.yaml", "--json", "--runs", "runs"]
    with subprocess.Popen(
        [sys.executable, "-c", "from shoal.cli import main; main()", *words], cwd=job_dir, stdout=subprocess.PIPE
    ) as driver:
        for line in driver.stdout:
            if b'"evaluated"' in line:
                break
        assert len(groups()) == 2
        os.kill(driver.pid, signal.SIGKILL)
    wait_until_no_groups()
