"""Real processes that die at any moment, and real processes that share a store."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.checkpoint.files import open_files
from shoal.checkpoint.manifest import list_manifests
from shoal.checkpoint.store import CheckpointStore
from shoal.checkpoint.writer import sweep_blobs

from . import saver_process as saver
from .states import bit_equal

KILLS = 15


@pytest.fixture
def savers():
    command = [sys.executable, str(Path(saver.__file__))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        yield process
        process.stdin.close()
        process.wait(timeout=60)


def order(process, *words) -> None:
    print(*words, file=process.stdin, flush=True)


def start(process, *words) -> int:
    order(process, *words)
    kind, pid = process.stdout.readline().split()
    assert kind == "pid"
    return int(pid)


def last_saved(process, *, pid: int, saves: int, within_s: float) -> int:
    """Let some saves and a part of the next go by, kill, and give the last step that was reported as saved."""
    step = -1
    for _ in range(saves):
        kind, value = process.stdout.readline().split()
        assert kind == "saved", (kind, value)
        step = int(value)
    select.select([], [], [], within_s)
    os.kill(pid, signal.SIGKILL)
    while True:
        kind, value = process.stdout.readline().split()
        if kind == "dead":
            return step
        step = int(value)


def test_no_moment_to_kill_a_save_loses_a_checkpoint(tmp_path, savers):
    chance = random.Random(5)
    first = 1
    for _ in range(KILLS):
        pid = start(savers, "kill", tmp_path, first)
        last_step = last_saved(savers, pid=pid, saves=chance.randint(1, 3), within_s=chance.uniform(0, 0.02))
        manifest, state = CheckpointStore(tmp_path, job_sha256="job").load_latest()
        assert manifest.step >= last_step, "a save that was reported as done must survive"
        assert bit_equal(state, saver.state(manifest.step))
        first = manifest.step + 1
    store = CheckpointStore(tmp_path, job_sha256="job", keep=1)
    store.save(first, saver.state(first))
    store.wait()
    assert sorted(open_files(tmp_path).sizes()) == sorted(
        [".lock", f"manifests/{first:012d}.json", *(f"blobs/{d[:2]}/{d}" for d in store.latest().blobs)]
    )


def test_two_processes_share_blobs_and_never_sweep_each_others(tmp_path, savers):
    for name in ("fold-0", "fold-1"):
        order(savers, "share", tmp_path, name, 60)
    ends = []
    while len(ends) < 2:
        line = savers.stdout.readline()
        ends += [line.split()] if line.startswith("end") else []
    assert sorted(ends) == [["end", "fold-0"], ["end", "fold-1"]]
    assert sweep_blobs(open_files(tmp_path))
    needed = {
        digest for name in ("fold-0", "fold-1") for m in list_manifests(tmp_path, name=name) for digest in m.blobs
    }
    assert {path.rsplit("/", 1)[1] for path in open_files(tmp_path).sizes("blobs")} == needed
