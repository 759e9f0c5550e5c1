"""Six jobs of different sizes on one machine: elastic workers, first come first served, and one after the other."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.report import SOURCES
from shoal.jobs import run_executor
from shoal.jobs.fork_servers import make_fork_server
from shoal.jobs.queue import client
from shoal.spec.job import Job
from shoal.spec.load import make_job
from shoal.spec.receipt import read_receipt_file
from shoal.spec.run_paths import RunPaths
from shoal.terminal.queue_tables import worker_picture

SIZES = (6, 1, 3, 0.5, 2, 0.5)
"""The lengths of the jobs, in units of `unit_steps`. A long one comes first, as it happens."""
HIDDEN = 384
BATCH = 256
POLL_S = 0.1
PICTURE_WIDTH = 80


def make(name: str, *, steps: int, hidden: int = HIDDEN, seed: int = 0) -> Job:
    data = {
        "name": name,
        "seed": seed,
        "model": {"name": "model.py:mlp", "args": {"hidden": hidden}},
        "loss": "CrossEntropyLoss",
        "optimizer": {"name": "SGD", "args": {"lr": 0.01}},
        "data": {"source": {"kind": "sklearn", "name": "digits"}},
        "batch_size": BATCH,
        "steps": steps,
        "lanes": 4,
        "workers": "1..2",
        "export": [],
    }
    return make_job(data, base_dir=str(SOURCES / "benchmarks" / "queue"))


def six_jobs(scratch: Path, *, unit_steps: int, every_s: float) -> dict[str, Any]:
    jobs = [make(f"job{n}", steps=int(size * unit_steps), seed=n) for n, size in enumerate(SIZES)]
    ways = {
        "one after the other": one_after_the_other(scratch / "plain", jobs, every_s=every_s),
        "first come first served": queued(scratch / "first-come", jobs, policy="first-come", every_s=every_s),
        "elastic": queued(scratch / "elastic", jobs, policy="elastic", every_s=every_s),
    }
    hashes = [way.pop("hashes") for way in ways.values()]
    picture = who_had_workers_when(scratch / "elastic")
    what = f"six jobs of {[int(size * unit_steps) for size in SIZES]} steps, one every {every_s:g} s"
    rows = [{"way": name, **found} for name, found in ways.items()]
    same = len(set(hashes)) == 1
    return {"what": what, "cores": len(os.sched_getaffinity(0)), "same bits": same, "picture": picture, "rows": rows}


def who_had_workers_when(runs: Path) -> list[str]:
    """The picture of `shoal top`, for all jobs."""
    history = client.read_history(runs)
    return worker_picture(history, sorted({change.id for change in history}), width=PICTURE_WIDTH)


def one_after_the_other(runs: Path, jobs: list[Job], *, every_s: float) -> dict[str, Any]:
    """As a script would: each with all workers that it may have, in the order of arrival."""
    began_s, took, hashes = time.monotonic(), [], []
    before = os.times()
    with make_fork_server(1, modules=["sklearn.datasets"]) as fork_server:
        for number, job in enumerate(jobs):
            arrives_s = began_s + number * every_s
            time.sleep(max(arrives_s - time.monotonic(), 0.0))
            result = run_executor.run(job, runs=runs, fork_server=fork_server)
            assert result.receipt is not None, result.error
            hashes.append(result.receipt.weights_sha256)
            took.append(time.monotonic() - arrives_s)
    after = os.times()
    cpu_s = sum(after[:4]) - sum(before[:4])
    return row(took, time.monotonic() - began_s, cpu_s, resizes=0, hashes=tuple(hashes))


def queued(runs: Path, jobs: list[Job], *, policy: str, every_s: float) -> dict[str, Any]:
    runs.mkdir(parents=True)
    before = os.times()
    began_s = time.monotonic()
    command = [sys.executable, "-m", "shoal.jobs.queue.serve", str(runs), "--policy", policy, "--idle-s", "3600"]
    daemon = subprocess.Popen(command, cwd=SOURCES, stdout=subprocess.DEVNULL)
    ended_s: dict[int, float] = {}
    arrived_s: dict[int, float] = {}
    waiting = list(jobs)
    while len(ended_s) < len(jobs):
        if waiting and time.monotonic() >= began_s + len(arrived_s) * every_s:
            number = client.submit([waiting.pop(0)], runs=runs, user="ann", start=False)[0].id
            arrived_s[number] = began_s + len(arrived_s) * every_s
        for entry in client.look(runs).entries.values():
            if entry.has_ended:
                ended_s.setdefault(entry.id, time.monotonic())
        if daemon.poll() is not None:
            raise RuntimeError(f"the daemon of the queue ended with code {daemon.returncode}")
        time.sleep(POLL_S)
    total_s = time.monotonic() - began_s
    client.down(runs)
    daemon.wait()
    after = os.times()
    entries = client.look(runs).entries
    hashes = tuple(_sha256(runs, entries[number].run) for number in sorted(entries))
    resizes = sum(bool(one.workers) for one in client.read_history(runs)) - len(jobs)
    took = [ended_s[number] - arrived_s[number] for number in sorted(ended_s)]
    return row(took, total_s, sum(after[:4]) - sum(before[:4]), resizes=resizes, hashes=hashes)


def row(took: list[float], total_s: float, cpu_s: float, *, resizes: int, hashes: tuple[str, ...]) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0))
    return {
        "until all are done s": round(total_s, 1),
        "mean completion s": round(statistics.mean(took), 1),
        "median s": round(statistics.median(took), 1),
        "cpu s": round(cpu_s, 1),
        "busy": round(cpu_s / (cores * total_s), 2),
        "resizes": resizes,
        "hashes": hashes,
    }


def _sha256(runs: Path, run: str) -> str:
    receipt = read_receipt_file(RunPaths.at(runs / run).receipt).own
    assert receipt is not None, f"{run} has no receipt"
    return receipt.weights_sha256
