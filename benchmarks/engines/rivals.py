"""Rivals on the same machine: torchrun, `srun torchrun` and Ray Train. Submit to first step, kill to next step."""

from __future__ import annotations

import contextlib
import itertools
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
    # agents count restarts apart from each other, and find addresses of dead workers in a store that they share: then
    # most restarts hang
    torchrun = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", sys.executable, "-m", "torch.distributed.run"]
    torchrun += ["--max-restarts=10"]
    if rival == "torchrun":
        return [*torchrun, "--standalone", "--nproc-per-node=2", str(JOB), str(directory)]
    if rival == "srun torchrun":
        rendezvous = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{_port()}"]
        steps = ["srun", "--nodes=2", "--ntasks-per-node=1", "--mpi=none", "--cpu-bind=none", "--kill-on-bad-exit=0"]
        return [*steps, *torchrun, *rendezvous, str(JOB), str(directory)]
    return [sys.executable, "-m", "benchmarks.engines.ray_train_job", address, str(directory)]


def measure_rival(rival: str, *, address: str = "auto") -> dict[str, float]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:  # workers may not have ended yet
        directory = Path(name)
        submitted_s = time.time()
        with _running(command(rival, directory, address=address), directory) as process:
            rows = StepRows(directory)
            first = _wait(process, rows, bool)[0]
            last = _wait(process, rows, _both_train)[-1]
            killed_s = time.time()
            os.kill(int(last["pid"]), signal.SIGKILL)
            pids = {row["pid"] for row in rows.read()}
            others = _wait(process, rows, lambda found: _first_after(found, killed_s, pids, last) is not None)
            after_s = _first_after(others, killed_s, pids, last)
            assert after_s is not None
        return {"submit to first step": first["t"] - submitted_s, "kill to next step of the others": after_s - killed_s}


def _first_after(
    rows: list[dict[str, float]], killed_s: float, pids: set[float], killed: dict[str, float]
) -> float | None:
    newer = itertools.takewhile(lambda row: row["t"] > killed_s, reversed(rows))
    return min((row["t"] for row in newer if _goes_on(row, killed_s, pids, killed)), default=None)


def _both_train(rows: list[dict[str, float]]) -> bool:
    return len({row["pid"] for row in rows}) == 2 and len(rows) > SETTLE_STEPS


def _goes_on(row: dict[str, float], killed_s: float, pids: set[float], killed: dict[str, float]) -> bool:
    """A step after the kill, by a process that is new, or two steps beyond where the killed one was: what was under
    way does not count."""
    return row["t"] > killed_s and (row["pid"] not in pids or row["step"] > killed["step"] + 2)


class StepRows:
    """What the ranks have written. Each row is parsed once: who looks must not take the processor from the rival."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._read_bytes: dict[Path, int] = {}
        self._rows: list[dict[str, float]] = []

    def read(self) -> list[dict[str, float]]:
        """All complete rows, in order of time."""
        for path in self.directory.glob("steps-*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read_bytes.get(path, 0))
                complete, end, _ = file.read().rpartition(b"\n")
            self._read_bytes[path] = self._read_bytes.get(path, 0) + len(complete + end)
            self._rows += [json.loads(line) for line in complete.splitlines()]
        self._rows.sort(key=lambda row: row["t"])
        return self._rows


def _wait(
    process: subprocess.Popen[bytes], rows: StepRows, holds: Callable[[list[dict[str, float]]], bool]
) -> list[dict[str, float]]:
    until = time.monotonic() + PATIENCE_S
    while not holds(found := rows.read()):
        if process.poll() is not None or time.monotonic() > until:
            why = "did nothing for long" if process.returncode is None else f"ended with exit code {process.returncode}"
            raise SystemExit(f"the rival {why}\n{(rows.directory / 'log').read_text()[-2000:]}")
        time.sleep(POLL_S)
    return found


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
