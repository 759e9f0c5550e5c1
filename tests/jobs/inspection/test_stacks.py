"""Stacks of live processes: one that computes, one that hangs in C with the interpreter's lock, one that is stopped."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from shoal.errors import ShoalError
from shoal.events import Event
from shoal.events.stream import format_event
from shoal.fleet.stack_dumps import STACK_SIGNAL, answers_stack_requests
from shoal.jobs.inspection import stacks
from shoal.jobs.inspection.stacks import collect_stacks
from shoal.spec.run_paths import RunPaths

WORKER = """
import ctypes, sys, threading
from shoal.fleet.process_main import hold_seat_lock
from shoal.spec.run_paths import RunPaths

def hangs_in_c():
    libc = ctypes.PyDLL(None)  # PyDLL keeps the interpreter's lock
    print("ready", flush=True)
    while True:
        libc.pause()  # returns after a signal

def waits():
    print("ready", flush=True)
    threading.Event().wait()

with hold_seat_lock(RunPaths.at(sys.argv[1]), int(sys.argv[2])):
    {"hangs_in_c": hangs_in_c, "waits": waits}[sys.argv[3]]()
"""


@pytest.fixture
def paths(tmp_path):
    paths = RunPaths.at(tmp_path)
    rows = [Event("worker_started", 1.0, f"worker-{n}", None, {"pid": 1, "host": host, "threads": 1, "torch": ""})
            for n, host in ((0, socket.gethostname()), (1, socket.gethostname()), (2, "elsewhere"))]  # fmt: skip
    paths.events.write_bytes(b"".join(map(format_event, rows)))
    return paths


@pytest.fixture
def start(paths):
    started = []

    def go(seat, what):
        words = [sys.executable, "-c", WORKER, str(paths.root), str(seat), what]
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "ready\n"
        return started[-1]

    yield go
    for one in started:
        one.kill()
        one.wait()
        one.stdout.close()


def test_workers_that_wait_and_hang_answer_and_go_on(paths, start):
    waits, hangs = start(0, "waits"), start(1, "hangs_in_c")
    first, second = collect_stacks(paths)
    assert (first.who, first.pid, second.who, second.pid) == ("worker-0", waits.pid, "worker-1", hangs.pid)
    assert "in waits" in first.text
    assert second.problem == ""
    assert "in hangs_in_c" in second.text
    assert "in waits" in collect_stacks(paths)[0].text  # only the new dump
    assert collect_stacks(paths)[0].text.count("in waits") == 1
    assert waits.poll() is None  # it lives


def test_a_worker_that_is_stopped_is_named(paths, start, monkeypatch):
    monkeypatch.setattr(stacks, "ANSWER_TIMEOUT_S", 0.3)
    one = start(0, "waits")
    os.kill(one.pid, signal.SIGSTOP)
    os.waitpid(one.pid, os.WUNTRACED)
    assert "SIGSTOP" in collect_stacks(paths)[0].problem


def test_a_process_without_the_handler_is_left_alone(paths, start, monkeypatch):
    """The signal would end it."""
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert not answers_stack_requests(other.pid)
        start(0, "waits")
        paths.seat_lock(0).write_text(str(other.pid))
        assert "cannot be asked" in collect_stacks(paths)[0].problem
        paths.seat_lock(0).write_text("")
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
        other.stdin.close()


def test_a_process_of_another_machine_is_not_signalled(paths, start, monkeypatch):
    start(2, "waits")
    monkeypatch.setattr(os, "kill", lambda *words: pytest.fail("a signal was sent"))
    assert "cannot be asked" in collect_stacks(paths)[0].problem


def test_a_run_without_processes(paths):
    with pytest.raises(ShoalError) as caught:
        collect_stacks(paths)
    assert caught.value.code == "SH612"


def test_the_signal_is_harmless_before_and_after(tmp_path):
    code = f"""
import os
from pathlib import Path
from shoal.fleet.stack_dumps import answer_stack_requests
Path("{tmp_path}/file").write_text("")
for path in (Path("{tmp_path}/logs/one"), Path("{tmp_path}/file/below")):
    with answer_stack_requests(path):
        os.kill(os.getpid(), {int(STACK_SIGNAL)})
    os.kill(os.getpid(), {int(STACK_SIGNAL)})
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert (tmp_path / "logs" / "one").read_text().count("Current thread") == 1
