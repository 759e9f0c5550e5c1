"""A run in a separate process, disturbed at random and measured meanwhile."""

from __future__ import annotations

import collections
import os
import random
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.report import environment
from benchmarks.soak.kinds import SoakKind
from shoal.errors import ShoalError
from shoal.events import EventReader, RunState
from shoal.jobs import commands
from shoal.spec.run_paths import RunPaths

PAUSE_S = 0.02
LEAST_WORKERS = 2
COUNTED = ("driver_memory_mb", "driver_fds", "driver_threads", "processes", "worker_memory_mb", "worker_fds",
           "worker_threads", "server_memory_mb", "server_fds")  # fmt: skip


class Soak:
    """A run of one kind. `driver` is the process that drives it now: another one after each `kill driver`."""

    def __init__(self, kind: SoakKind, scratch: Path, *, seed: int) -> None:
        self.job = scratch / "job.yaml"
        self.job.write_text(yaml.safe_dump(kind.job | {"steps": 10**8}))
        self.paths = RunPaths.at(scratch / "runs" / "soak-1")
        self.log = scratch / "log"
        self.state = RunState()
        self.events: collections.Counter[str] = collections.Counter()
        self.faults: collections.Counter[str] = collections.Counter()
        self._kind = kind
        self._reader = EventReader(self.paths.events)
        self._rng = random.Random(seed)
        self._workers = kind.workers
        self._driving_pid = 0
        self.driver = self._drive("run", str(self.job), "--workers", str(kind.workers))

    def _drive(self, *words: str) -> psutil.Popen:
        command = [sys.executable, "-m", "shoal", *words, "--quiet", "--runs", str(self.paths.root.parent)]
        with self.log.open("a") as log:
            env = environment() | {"SOAK_PAUSE_S": str(PAUSE_S)}
            return psutil.Popen(command, env=env, stdout=log, stderr=log)

    @property
    def alive(self) -> bool:
        return self.driver.poll() is None

    def poll_events(self) -> None:
        for event in self._reader.read_new():
            self.state.apply(event)
            self.events[event.kind] += 1
            if event.kind == "run_started":
                self._driving_pid = event.get("pid", 0)

    @property
    def trains(self) -> bool:
        """Whether the present driver drives workers that train. After a `kill driver` that takes some seconds."""
        return self._driving_pid == self.driver.pid and bool(self.state.training_workers)

    def stop(self) -> None:
        """Let the workers save, and wait for the end."""
        commands.stop(self.paths)
        self.driver.wait()
        self.poll_events()

    def close(self) -> None:
        """Leave no process behind, however the soak ended."""
        if self.alive:
            self.driver.terminate()
            self.driver.wait()

    # ---- faults ----

    def disturb(self) -> str:
        """Inject one of the kind's faults, at random. Returns what was done."""
        self.poll_events()
        fault = self._rng.choice(self._kind.faults)
        try:
            done = self._inject(fault)
        except (ProcessLookupError, psutil.Error, IndexError, ShoalError) as missed:
            return f"{fault} failed: {missed}"
        self.faults[fault] += 1
        return done

    def _inject(self, fault: str) -> str:
        if fault == "kill driver":
            self._replace_driver()
        elif fault in ("join", "leave"):
            wanted = self._workers + (1 if fault == "join" else -1)
            self._workers = max(LEAST_WORKERS, min(wanted, self._kind.most_workers))
            commands.scale(self.paths, self._workers)
        else:
            act, whom = fault.split()
            victim = self._victim(whom)
            os.kill(victim, signal.SIGKILL if act == "kill" else signal.SIGSTOP)
            return f"{fault} ({victim})"
        return fault

    def _victim(self, whom: str) -> int:
        if whom == "server":
            return self._rng.choice(self.state.serving_servers).pid
        worker = self._rng.choice(self.state.training_workers).pid
        return self._rng.choice(psutil.Process(worker).children()).pid if whom == "loader" else worker

    def _replace_driver(self) -> None:
        """Kill the driver, and resume the run: its workers and servers live on."""
        self.driver.kill()
        self.driver.wait()
        self._workers = self._kind.workers
        self.driver = self._drive("resume", self.paths.name)

    # ---- measuring ----

    def counts(self) -> dict[str, float]:
        """Resources that the run's processes use now; of workers and servers, the largest."""
        self.poll_events()
        workers = _used([worker.pid for worker in self.state.training_workers])
        servers = _used([server.pid for server in self.state.serving_servers])
        driver = _used([self.driver.pid])
        return {
            "processes": len(workers) + len(servers) + len(driver),
            **{f"driver_{key}": _most(driver, key) for key in ("memory_mb", "fds", "threads")},
            **{f"worker_{key}": _most(workers, key) for key in ("memory_mb", "fds", "threads")},
            **{f"server_{key}": _most(servers, key) for key in ("memory_mb", "fds")},
        }


def _used(pids: list[int]) -> list[dict[str, float]]:
    """Memory, descriptors and threads of the processes that still run."""
    found = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            fds, threads = process.num_fds(), process.num_threads()
            found.append({"memory_mb": _memory_mb(pid), "fds": fds, "threads": threads})
        except (psutil.Error, OSError, KeyError):  # KeyError: it has ended, and nobody has waited for it
            continue
    return found


def _memory_mb(pid: int) -> float:
    """Memory that is no file's, also if others share it. Private memory would seem to grow without a leak: all that a
    process has from the fork server becomes private when that and the process's siblings have ended."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return round(sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024 / 1e6, 1)


def _most(used: list[dict[str, float]], key: str) -> float:
    return max((one[key] for one in used), default=0)


def quarters(samples: list[dict[str, float]], key: str) -> list[float]:
    """The median of each quarter of the time. Moments without such a process do not count."""
    size = max(len(samples) // 4, 1)
    parts = [samples[i * size : (i + 1) * size] for i in range(4)]
    return [statistics.median([s[key] for s in part if s[key]] or [0]) for part in parts if part]


def summary(one: Soak, samples: list[dict[str, float]]) -> dict[str, Any]:
    return {
        "faults": dict(one.faults),
        "evicted": one.events["evicted"],
        "deaths": one.state.deaths,
        "server_deaths": one.state.server_deaths,
        "loaders_restarted": one.events["loader_restarted"],
        "drivers": one.state.starts,
        "views": one.state.views,
        "back_to_a_checkpoint": one.events["resumed"],
        "steps_computed_again": one.state.redone,
        "quarters": {key: found for key in COUNTED if any(found := quarters(samples, key))},
    }
