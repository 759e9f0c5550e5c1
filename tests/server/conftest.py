"""Servers forked from the tests' fork_server, and workers as processes of their own."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import shoal.server
from shoal.events import read_events

WORKER = Path(__file__).parent / "client_process.py"
SGD_LR_1 = {"name": "SGD", "args": {"lr": 1.0}}


def zero_values():
    """Three keys of two kinds, in several chunks."""
    return {"w": np.zeros((200, 80), np.float32), "b": np.zeros(5), "c": np.zeros((), np.float32)}


@pytest.fixture
def start(fork_server, monkeypatch, tmp_path):
    """`shoal.server.start` without an import of torch for each test; events lie in `events` of the directory."""
    monkeypatch.setattr(
        "shoal.jobs.fork_servers.make_fork_server", lambda *_, **__: contextlib.nullcontext(fork_server)
    )
    with contextlib.ExitStack() as open_:

        def go(values=None, *, optimizer=SGD_LR_1, from_=None, **options):
            values = zero_values() if values is None and from_ is None else values
            optimizer = None if from_ is not None and optimizer is SGD_LR_1 else optimizer
            directory = tmp_path / f"servers-{len(list(tmp_path.iterdir()))}"
            made = shoal.server.start(values, optimizer=optimizer, from_=from_, directory=directory, **options)
            return open_.enter_context(made)

        yield go


@pytest.fixture
def worker():
    """Starts a worker process; those that still run at the end are killed."""
    started = []

    def go(servers, number, steps):
        command = [sys.executable, str(WORKER), servers.address, str(number), str(steps)]
        environment = os.environ | {"SHOAL_TOKEN": servers.token}
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        return started[-1]

    yield go
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def events_of_kind(servers, kind):
    return [event for event in read_events(servers.directory / "events.jsonl") if event.kind == kind]


def worker_losses(servers, worker):
    """How often this worker went."""
    return sum(event["message"] == f"worker {worker} is gone" for event in events_of_kind(servers, "note"))


def server_pids(servers):
    """Process ids of the servers, by name."""
    gone = {event["server"] for event in events_of_kind(servers, "server_died")}
    return {
        event["server"]: event["pid"]
        for event in events_of_kind(servers, "server_started")
        if event["server"] not in gone
    }


def read_word(process, word):
    """The next line that begins with this word, without it."""
    for line in process.stdout:
        if line.split()[:1] == [word]:
            return line.split()[1:]
    raise AssertionError(f"the worker ended with {process.wait()} and never said '{word}'")
