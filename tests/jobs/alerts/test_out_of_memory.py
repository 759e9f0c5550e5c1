"""A worker that the kernel ends for lack of memory is named, with what it used; the run goes on to the same weights."""

import contextlib
import os
import time
from pathlib import Path

import pytest

from shoal.events import Event, EventWriter, read_events
from shoal.jobs.alerts.watch import RunWatch
from shoal.spec.load import make_job
from shoal.spec.run_paths import RunPaths
from tests.conftest import MLP

LIMIT_BYTES = 150_000_000
PLACES = ((Path("/sys/fs/cgroup"), "memory.max"), (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"))


@pytest.fixture
def memory_group():
    """A real group of the kernel with a limit, of either version of cgroups."""
    name = f"shoal-test-{os.getpid()}"
    for root, limit in PLACES:
        group = root / name
        if not (root / "cgroup.procs").is_file():  # it is not a tree of groups
            continue
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / limit).is_file():
                (group / limit).write_text(str(LIMIT_BYTES))
                yield group
                return
        finally:
            _remove(group)
    pytest.skip("no memory groups can be made here")


def _remove(group):
    """It is empty soon after its last process has ended."""
    until = time.monotonic() + 30
    while group.exists():
        with contextlib.suppress(OSError):
            group.rmdir()
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.root
def test_a_worker_that_the_kernel_ends_is_named(run, job_dir, memory_group):
    fault = {"name": "faults.py:UseUpMemory", "args": {"step": 20, "group": str(memory_group), "marks": str(job_dir)}}
    done = run(MLP, steps=40, watchers=[fault], elastic={"restarts": 1})
    (death,) = [event for event in read_events(done.paths.events) if event.kind == "worker_died"]
    assert death["reason"] == "SIGKILL (the kernel's out-of-memory killer was at work)"
    assert done.receipt.weights_sha256 == run(MLP, steps=40).receipt.weights_sha256


@pytest.mark.root
def test_a_worker_that_is_killed_by_somebody_else_is_not_blamed_on_memory(run, job_dir):
    fault = {"name": "faults.py:KillAt", "args": {"steps": [20], "marks": str(job_dir)}}
    done = run(MLP, steps=40, watchers=[fault], elastic={"restarts": 1})
    (death,) = [event for event in read_events(done.paths.events) if event.kind == "worker_died"]
    assert death["reason"] == "SIGKILL"


def test_what_a_killed_worker_used_is_told(tmp_path):
    paths = RunPaths.at(tmp_path)
    stream = EventWriter(paths.events, "driver")
    follows = RunWatch(make_job(MLP, base_dir=".", check_names=False), paths, stream)
    for worker, reason in (("worker-0", "SIGKILL"), ("worker-1", "exit code 1"), ("worker-2", "SIGKILL")):
        if worker != "worker-2":  # it told nothing
            usage = {"worker": worker, "cpu": 1.0, "rss_bytes": 3 * 10**9, "room_bytes": 10**9}
            follows.observe(Event("usage", 1.0, "driver", None, usage))
        follows.observe(Event("worker_died", 2.0, "driver", 5, {"worker": worker, "reason": reason}))
    follows.close()
    stream.close()
    notes = [event["message"] for event in read_events(paths.events) if event.kind == "note"]
    assert notes == ["worker-0 was killed: when it told last, it used 3.0 GB and 1.0 GB were left"]
