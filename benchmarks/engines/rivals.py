"""Rivals on the same machine: torchrun, `srun torchrun` and Ray Train. Submit to first step, kill to next step."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.report import environment

RIVALS = ("torchrun", "srun torchrun", "ray train")
PATIENCE_S = 300.0
SETTLE_STEPS = 200
POLL_S = 0.005
JOB = Path(__file__).with_name("rival_job.py")


def command(rival: str, directory: Path, *, address: str) -> list[str]:
    """Two workers. torchrun has both on one node; srun has one on each of two nodes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=10"]
    if rival == "torchrun":
        return [*torchrun, "--standalone", "--nproc-per-node=2", str(JOB), str(directory)]
    if rival == "srun torchrun":
        rendezvous = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{_port()}"]
        steps = ["srun", "--nodes=2", "--ntasks-per-node=1", "--mpi=none", "--cpu-bind=none", "--kill-on-bad-exit=0"]
        return [*steps, *torchrun, *rendezvous, str(JOB), str(directory)]
    return [sys.executable, "-m", "benchmarks.engines.ray_train_job", address, str(directory)]


def measure_rival(rival: str, *, address: str = "auto") -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        submitted_s = time.time()
        with _running(command(rival, directory, address=address), directory) as process:
            first = _wait(process, directory, bool)[0]
            last = _wait(process, directory, _both_train)[-1]
            killed_s = time.time()
            os.kill(int(last["pid"]), signal.SIGKILL)
            pids = {row["pid"] for row in _rows(directory)}
            others = _wait(process, directory, lambda rows: any(_goes_on(row, killed_s, pids, last) for row in rows))
            after = min(row["t"] for row in others if _goes_on(row, killed_s, pids, last))
        return {"submit to first step": first["t"] - submitted_s, "kill to next step of the others": after - killed_s}


def _both_train(rows: list[dict[str, float]]) -> bool:
    return len({row["pid"] for row in rows}) == 2 and len(rows) > SETTLE_STEPS


def _goes_on(row: dict[str, float], killed_s: float, pids: set[float], killed: dict[str, float]) -> bool:
    """A step after the kill, by a process that is new, or two steps beyond where the killed one was: what was under
    way does not count."""
    return row["t"] > killed_s and (row["pid"] not in pids or row["step"] > killed["step"] + 2)


def _rows(directory: Path) -> list[dict[str, float]]:
    """All complete rows, in order of time."""
    found = []
    for file in directory.glob("steps-*.jsonl"):
        found += [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return sorted(found, key=lambda row: row["t"])


def _wait(
    process: subprocess.Popen[bytes], directory: Path, holds: Callable[[list[dict[str, float]]], bool]
) -> list[dict[str, float]]:
    until = time.monotonic() + PATIENCE_S
    while not holds(rows := _rows(directory)):
        if process.poll() is not None or time.monotonic() > until:
            why = "did nothing for long" if process.returncode is None else f"ended with exit code {process.returncode}"
            raise SystemExit(f"the rival {why}\n{(directory / 'log').read_text()[-2000:]}")
        time.sleep(POLL_S)
    return rows


@contextlib.contextmanager
def _running(words: list[str], directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(words, env=environment(), stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        (directory / "stop").touch()
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
