"""A profile of some steps on a live run: what each operator took, as a Chrome trace. The bits stay the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler

from shoal.fleet.profile_request import ProfileRequest, read_profile_request
from shoal.spec.run_paths import RunPaths


class StepProfiler:
    """Called by the training thread between steps: one `stat` while nothing is asked for. A failure is told, and
    training goes on. `deliver(name, file)` gets the trace of a worker that cannot open the run's directory."""

    def __init__(self, paths: RunPaths, *, who: Callable[[], str], note: Callable[[str], object]) -> None:
        self._paths, self._who, self._note = paths, who, note
        self._path = os.fspath(paths.profile_request)
        self._seen: tuple[int, int] = (0, 0)
        self._asked: ProfileRequest | None = None
        self._running: Any = None
        self._label: Any = None
        self.deliver: Callable[[str, Path], None] = lambda name, file: None

    def at_boundary(self, step: int) -> None:
        if self._asked is None:
            self._look(step)
        if self._asked is None or step < self._asked.first_step:
            return
        try:
            self._advance(self._asked, step)
        except Exception as failure:
            self._asked = self._running = self._label = None
            self._note(f"no profile: {type(failure).__name__}: {failure}")

    def _look(self, step: int) -> None:
        try:
            found = os.stat(self._path, follow_symlinks=False)
        except OSError:
            return
        identity = found.st_ino, found.st_mtime_ns
        if identity != self._seen:
            self._seen = identity
            asked = read_profile_request(self._paths.profile_request)
            self._asked = asked if asked is not None and step < asked.end else None

    def _advance(self, asked: ProfileRequest, step: int) -> None:
        if self._label is not None:
            self._label.__exit__(None, None, None)
            self._label = None
        if self._running is None:
            # not torch.profiler, whose start loads 800 modules: a worker would stand still for seconds
            self._running = profiler.profile(use_device="cuda" if torch.cuda.is_available() else None, use_kineto=True)
            self._running.__enter__()
        elif step >= asked.end:
            self._write(asked, self._running)
            return
        self._label = profiler.record_function(f"step {step}")
        self._label.__enter__()

    def _write(self, asked: ProfileRequest, running: Any) -> None:
        self._asked = self._running = None
        running.__exit__(None, None, None)
        directory = self._paths.profiles / asked.name
        directory.mkdir(parents=True, exist_ok=True)
        part = directory / f".{self._who()}.tmp"
        running.export_chrome_trace(str(part))
        done = part.replace(directory / f"{self._who()}.json")
        self.deliver(asked.name, done)
