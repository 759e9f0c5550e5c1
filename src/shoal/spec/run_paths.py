"""The layout of a run directory."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from shoal.spec.view import Role

BESIDE_RUNS = frozenset(
    (".queue", ".trash", ".index.json", ".tags.json", ".tags.lock", ".web-tokens.json", ".web-tokens.lock")
)
"""What Shoal keeps beside the runs. None of it is sent to other machines: it has tokens, and whoever opens and closes
the file of a queue in the process of its daemon takes SQLite's locks from it."""
SEAT_LOCK = re.compile(r"\.seat-(\d{1,9})\.(worker|server)\.lock")
"""The name of a seat's lock: number and role."""


@dataclass(frozen=True)
class RunPaths:
    """A run's directory: resolved job, events, views, logs, checkpoints, model, receipt."""

    root: Path

    @classmethod
    def at(cls, root: str | os.PathLike[str]) -> RunPaths:
        return cls(Path(root).resolve())

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def job(self) -> Path:
        return self.root / "job.yaml"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def state_snapshot(self) -> Path:
        """The state folded from the events. It can be rebuilt, and may be deleted at any time."""
        return self.root / ".state.json"

    @property
    def history(self) -> Path:
        """Curves and timeline, folded from the events. It can be rebuilt, and may be deleted at any time."""
        return self.root / ".history.bin"

    @property
    def plan(self) -> Path:
        """The plan of a `sync: auto` job and its inputs, shared by all folds."""
        return self.parent_run.root / "plan.json"

    def store(self, checkpoint_path: str | None) -> str:
        """The checkpoint store: a directory below the job's `checkpoint.path`, or in the run directory."""
        return f"{checkpoint_path.rstrip('/')}/{self.parent_run.name}" if checkpoint_path else str(self.checkpoints)

    @property
    def search_journal(self) -> Path:
        """The journal of a search. A directory that has one is that of a search, not of a run."""
        return self.root / "search.jsonl"

    @property
    def asked_compression(self) -> Path:
        """What a compression was asked for, while it lasts; one of a queue has none. See `AskedCompression`."""
        return self.root / "rungs" / "asked.json"

    @property
    def driver_address(self) -> Path:
        """Address and token of the driver, readable only by this user."""
        return self.root / ".control.json"

    @property
    def kept_agents(self) -> Path:
        """The agents that may outlive the driver."""
        return self.root / ".agents.json"

    @property
    def trace(self) -> Path:
        """A digest of the state after every step, if requested."""
        return self.root / "trace.jsonl"

    @property
    def lock(self) -> Path:
        return self.root / ".lock"

    @property
    def parent_run(self) -> RunPaths:
        """The run that this one is a fold of, or this one."""
        if not self.name.startswith("fold-"):
            return self
        parent = RunPaths(self.root.parent)
        return parent if parent.job.is_file() else self

    @property
    def checkpoints(self) -> Path:
        """The store. The folds of a job share it, so equal blobs are stored once."""
        return self.parent_run.root / "checkpoints"

    @property
    def checkpoint_namespace(self) -> str:
        """The name of this fold's checkpoints in the shared store."""
        return "" if self.parent_run is self else self.name

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def receipt(self) -> Path:
        return self.root / "receipt.json"

    @property
    def folds(self) -> list[RunPaths]:
        """The runs of a job with folds, in order."""
        found = (p for p in self.root.glob("fold-*") if p.is_dir() and p.name[5:].isdecimal())
        return [RunPaths(p) for p in sorted(found, key=lambda p: int(p.name[5:]))]

    def fold(self, number: int) -> RunPaths:
        return RunPaths(self.root / f"fold-{number}")

    @property
    def code(self) -> Path:
        """Archives of the job's directory, for workers that do not have it; shared by all folds."""
        return self.parent_run.root / ".code"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def log(self, seat: int, role: Role = "worker") -> Path:
        """Standard output of a worker or server."""
        return self.logs / f"{role}-{seat}.log"

    def error_log(self, seat: int, role: Role = "worker") -> Path:
        """Standard error of a worker or server: warnings and tracebacks."""
        return self.logs / f"{role}-{seat}.err"

    def stacks(self, seat: int, role: Role = "worker") -> Path:
        """Where a worker or server writes its stacks when it is asked for them."""
        return self.logs / f"{role}-{seat}.stacks"

    @property
    def profiles(self) -> Path:
        """Profiles of some steps, and what workers wrote for one that is being made."""
        return self.root / "profiles"

    @property
    def profile_request(self) -> Path:
        """The last request for a profile. Workers look for it between steps."""
        return self.root / ".profile.json"

    @property
    def saving_lock(self) -> Path:
        """Held while a worker saves without a driver."""
        return self.root / ".saving.lock"

    def seat_lock(self, seat: int, role: Role = "worker") -> Path:
        """Held by the process of a seat while it lives. The file contains its pid."""
        return self.root / f".seat-{seat}.{role}.lock"


def cache_directory() -> Path:
    """The data cache, shared by all runs of this user. It may be deleted at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal"


def write_atomically(path: Path, content: str) -> None:
    """Write the file completely or not at all, even if the machine crashes."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
