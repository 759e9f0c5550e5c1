"""What a soak counts, and that its jobs and faults are real ones."""

import os
import signal
import subprocess
import sys

import pytest
import yaml
from benchmarks.soak.disturbance import COUNTED, Soak, _used, quarters
from benchmarks.soak.kinds import KINDS

from shoal.spec.load import load_job

HELD_BYTES = 64 << 20
FORKED = f"""
import os, signal, sys
held = b"x" * {HELD_BYTES}
if os.fork():
    sys.stdin.read()
else:
    print(os.getpid(), flush=True)
    signal.pause()
"""
GROWING = """
import sys
from shoal.collectives.transport.shared_memory import SharedMemory
print(flush=True)
sys.stdin.readline()
held = {made}
held[:] = b"x" * {size}
print(flush=True)
sys.stdin.readline()
"""


def test_quarters_are_medians_of_moments_with_such_a_process():
    samples = [{"server_fds": value} for value in (1, 3, 5, 0, 0, 7, 9, 11)]
    assert quarters(samples, "server_fds") == [2, 5, 7, 10]
    assert quarters([], "server_fds") == []
    assert quarters(samples[:1], "server_fds") == [1]


@pytest.mark.parametrize("name", KINDS)
def test_the_job_of_each_kind_is_valid_and_promises_what_is_compared(name, tmp_path):
    kind = KINDS[name]
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(kind.job | {"steps": 10}))
    job = load_job(tmp_path / "job.yaml", overrides=[f"workers={kind.workers}"])
    assert job.sync.inexact_reason == ""
    assert job.shard.kind == ("fsdp" if name == "fsdp" else "none")
    assert ("kill server" in kind.faults) == (job.sync.kind == "server")
    if job.shard.kind != "none":
        assert kind.workers == kind.reference_workers
        assert not {"join", "leave"} & set(kind.faults), "another layout has other bits"


def test_a_fault_that_finds_no_victim_is_told_and_not_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(Soak, "_drive", lambda self, *words: None)
    one = Soak(KINDS["fsdp"], tmp_path, seed=1)
    one._rng.choice = lambda found: found[0]
    assert one.disturb().startswith("kill worker failed")
    assert not one.faults


def test_what_is_counted_has_a_name(tmp_path, monkeypatch):
    class Driver:
        pid = os.getpid()

    monkeypatch.setattr(Soak, "_drive", lambda self, *words: Driver())
    assert set(Soak(KINDS["lanes"], tmp_path, seed=1).counts()) == set(COUNTED)


def memory_bytes(pid):
    (used,) = _used([pid])
    return used["memory_mb"] * 1e6


def test_a_process_does_not_grow_when_the_one_that_forked_it_ends():
    """A driver that is killed takes its fork server along. What that had imported is then its last child's alone."""
    parent = subprocess.Popen([sys.executable, "-c", FORKED], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child = int(parent.stdout.readline())
    try:
        before = memory_bytes(child)
        parent.stdin.close()
        parent.wait()
        assert abs(memory_bytes(child) - before) < HELD_BYTES / 4
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()


@pytest.mark.parametrize("make", ["SharedMemory({0}).buffer.raw", "bytearray({0})"])
def test_a_process_that_holds_more_grows(make):
    """In a process of its own: one that has run other tests may have that much memory to use again."""
    code = GROWING.format(made=make.format(HELD_BYTES), size=HELD_BYTES)
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        process.stdout.readline()
        before = memory_bytes(process.pid)
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        assert memory_bytes(process.pid) - before > HELD_BYTES / 2


def test_a_process_that_has_ended_is_not_counted():
    ended = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    ended.stdout.read()
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # it stays, without memory, until it is waited for
    assert _used([ended.pid]) == []
    ended.wait()
    assert _used([ended.pid]) == []
    ended.stdout.close()
