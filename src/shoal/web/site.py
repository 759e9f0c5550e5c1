"""What a server knows of its directory of runs: rows of the list, states and histories that follow the files, and
operations that are going on. Everything here can be read again from the files."""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import shutil
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from shoal.errors import error
from shoal.events import RunState, RunStateReader
from shoal.events.packed_file import stat_content
from shoal.jobs import run_dir, run_index
from shoal.plan.disk_forecast import DiskForecast
from shoal.spec.run_paths import RunPaths
from shoal.storage.tags import read_tags
from shoal.web.gate import RequestRefused

if TYPE_CHECKING:
    from shoal.storage.history import RunHistory
    from shoal.web.searches import FollowedSearch

MAX_STATES = 256
MAX_SEARCHES = 16
MAX_HISTORY_BYTES = 128 << 20
MANY_NEW_RUNS = 200
UNFINISHED = ("created", "starting", "training", "unreadable")
GOES_ON = (*UNFINISHED, "search searching", "search stopped")
LIST_LIFETIME_S = 1.0
LOOKS = 100
OPERATION_WAIT_S = 2.0
CLOSE_S = 0.25
MAX_OPERATIONS = 1000
MAX_RUNNING = 4
"""Operations of one identity that run at the same time: those of many identities have threads."""
_PART = re.compile(r"(.+?)((?:~(?:fold|trial)-\d{1,6}){1,2})")

Kept = TypeVar("Kept")


class RunCache(Generic[Kept]):
    """Objects by run that follow its files, each used by one thread at a time; the oldest are dropped."""

    def __init__(self, make: Callable[[RunPaths], Kept], *, is_full: Callable[[list[Kept]], bool]) -> None:
        self._make, self._is_full = make, is_full
        self._kept: OrderedDict[Path, tuple[threading.Lock, list[Kept]]] = OrderedDict()
        self._lock = threading.Lock()

    @contextmanager
    def use(self, paths: RunPaths) -> Iterator[Kept]:
        with self._lock:
            lock, holder = self._kept.pop(paths.root, (threading.Lock(), []))
            self._kept[paths.root] = lock, holder
            while len(self._kept) > 1 and self._is_full([one for _, held in self._kept.values() for one in held]):
                self._kept.popitem(last=False)
        with lock:
            if not holder:
                holder.append(self._make(paths))
            yield holder[0]

    def drop(self, paths: RunPaths) -> None:
        with self._lock:
            self._kept.pop(paths.root, None)


class FollowedState:
    """The state of a run. A stream that was replaced or cut is read from its beginning."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._open()

    def _open(self) -> None:
        self._inode, self._size = self._identity()
        self._reader = RunStateReader(self._paths.events, self._paths.state_snapshot)

    def _identity(self) -> tuple[int, int]:
        try:
            found = stat_content(self._paths.events)
        except OSError:
            return 0, 0
        return found.st_ino, found.st_size

    def catch_up(self) -> RunState:
        inode, size = self._identity()
        if inode != self._inode or size < self._size:
            self._open()
        self._size = size
        state = self._reader.catch_up()
        self._reader.save_if_useful()
        return state


class FollowedSummaries:
    """The rows of all runs. A run that has ended is read again only when its stream changes, and its stream is looked
    at only so often that the looking takes a hundredth of the time. Directories that are links are left out. Belongs
    to one thread at a time."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._known: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {}
        self._rows: list[dict[str, Any]] = []
        self._look_at_s = -math.inf
        """When the streams of runs that have ended are looked at again."""

    def read(self, *, every: bool = False) -> list[dict[str, Any]]:
        """The same list as before if nothing has changed. `every`: look at all streams now."""
        began_s = time.monotonic()
        is_due = every or began_s >= self._look_at_s
        names, looked_at = self._look(every=is_due)
        if is_due:
            self._look_at_s = began_s + (1 + LOOKS) * (time.monotonic() - began_s)
        new = {name: stream for name, stream in looked_at.items() if not self._is_current(name, stream)}
        if len(new) > MANY_NEW_RUNS:  # with the index of `shoal runs`
            found = {row["run"]: row for row in run_index.list_summaries(self._runs) if row["run"] in new}
        else:
            paths = (RunPaths(self._runs / name) for name in new)
            found = {one.name: run_index.list_row(one) for one in paths if _is_file(one.job)}
        before = self._known
        kept = {name: one for name, one in before.items() if name in names and name not in new}
        self._known = kept | {name: (new[name], row) for name, row in found.items()}
        if before.keys() != self._known.keys() or any(before[name][1] != row for name, row in found.items()):
            self._rows = [row for _, row in self._known.values()]
        return self._rows

    def _is_current(self, name: str, stream: tuple[int, ...]) -> bool:
        known = self._known.get(name)
        return known is not None and known[0] == stream and known[1]["status"] not in UNFINISHED

    def _look(self, *, every: bool) -> tuple[set[str], dict[str, tuple[int, ...]]]:
        """The names of all directories, and the streams of all, or of those that are new or have not ended."""
        names, looked_at = set(), {}
        with os.scandir(self._runs) as entries:
            for entry in entries:
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                    names.add(entry.name)
                    known = self._known.get(entry.name)
                    if every or known is None or known[1]["status"] in GOES_ON:
                        looked_at[entry.name] = _stream_of(entry.path)
        return names, looked_at


def _stream_of(run: str) -> tuple[int, ...]:
    """Size, time of change and inode of a run's stream, or of a search's journal; nothing if there is none yet."""
    for file in ("events.jsonl", "search.jsonl"):
        with contextlib.suppress(OSError):
            stream = stat_content(f"{run}/{file}")
            driven = file == "search.jsonl" and run_dir.is_driven(RunPaths(Path(run)))
            return stream.st_size, stream.st_mtime_ns, stream.st_ino, driven
    return ()


@dataclass
class Operation:
    """Something that was asked for, and goes on in a thread."""

    name: str
    what: str
    run: str
    by: str
    future: Future[dict[str, Any]]
    started_t: float = field(default_factory=time.time)


class Site:
    """Safe for several threads. `say` gets a line for each change that somebody makes."""

    def __init__(self, runs: Path, *, say: Callable[[str], None] = lambda line: None) -> None:
        self.runs = run_dir.check_runs(runs).resolve()
        self.say = say
        self.stopping = threading.Event()
        self.states = RunCache(FollowedState, is_full=lambda held: len(held) > MAX_STATES)
        self.histories = RunCache(
            _open_history, is_full=lambda held: sum(one.size_bytes for one in held) > MAX_HISTORY_BYTES
        )
        self.searches = RunCache(_open_search, is_full=lambda held: len(held) > MAX_SEARCHES)
        self._operations: OrderedDict[str, Operation] = OrderedDict()
        self._operations_lock = threading.Lock()
        self._pool = ThreadPoolExecutor(64, thread_name_prefix="operation")
        self._list_lock = threading.Lock()
        self._summaries = FollowedSummaries(self.runs)
        self._listed: tuple[float, list[dict[str, Any]]] = (-math.inf, [])
        self._made_of: tuple[list[dict[str, Any]], dict[str, list[str]]] = ([], {})
        self._disk = DiskForecast()
        threading.Thread(target=self._sample_disk, name="disk", daemon=True).start()

    def _sample_disk(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                self._disk.observe(time.monotonic(), shutil.disk_usage(self.runs).free)
            if self.stopping.wait(self._disk.every_s):
                return

    def full_in_s(self) -> float | None:
        """When the disk of the runs will be full; None if it does not fill, or that is not known yet."""
        return self._disk.full_in_s()

    def find(self, name: str) -> RunPaths:
        """A run by its name, or a fold or trial as `run~fold-0`. The name is that of a directory here, never a path."""
        whole, parts = found.groups() if (found := _PART.fullmatch(name)) else (name, "")
        root = self.runs / whole
        is_name = whole == root.name and not whole.startswith(".") and "/" not in whole and whole.isprintable()
        inner = [root.joinpath(*parts.split("~")[1 : n + 1]) for n in range(parts.count("~") + 1)]
        if is_name and all(map(_is_directory, inner)) and _is_file(inner[-1] / "job.yaml"):
            return RunPaths(inner[-1])
        raise error("SH601", f"there is no run '{name[:200]}'")

    def owner(self, paths: RunPaths) -> str:
        """The name of the run that a token may see: that of the directory here."""
        return paths.root.relative_to(self.runs).parts[0]

    def rows(self, *, fresh: bool = False) -> list[dict[str, Any]]:
        """The rows of the list, at most a second old, with tags; the same list as before if nothing has changed."""
        with self._list_lock:
            at, rows = self._listed
            if fresh or time.monotonic() - at > LIST_LIFETIME_S:
                made_of = self._summaries.read(every=fresh or at == -math.inf), read_tags(self.runs)
                if made_of[0] is not self._made_of[0] or made_of[1] != self._made_of[1]:
                    rows = [_listed_row(row, made_of[1].get(row["run"], [])) for row in made_of[0]]
                self._listed, self._made_of = (time.monotonic(), rows), made_of
            return rows

    def forget_rows(self) -> None:
        with self._list_lock:
            self._listed = (-math.inf, self._listed[1])

    def state(self, paths: RunPaths) -> RunState:
        with self.states.use(paths) as one, run_dir.readable(paths):
            return one.catch_up()

    def begin(self, what: str, run: str, by: str, act: Callable[[], dict[str, Any]]) -> Operation:
        """Do something in a thread, and wait a moment for it. Raises the error that it raised meanwhile. RequestRefused
        if too much of what this identity asked for goes on."""
        with self._operations_lock:
            if sum(one.by == by and not one.future.done() for one in self._operations.values()) >= MAX_RUNNING:
                raise RequestRefused(429, f"{MAX_RUNNING} operations of yours are going on; wait for one of them")
            self.say(f"{by}: {what} {run}")
            operation = Operation(secrets.token_hex(8), what, run, by, self._pool.submit(act))
            while len(self._operations) >= MAX_OPERATIONS:
                self._operations.popitem(last=False)
            self._operations[operation.name] = operation
        wait([operation.future], timeout=OPERATION_WAIT_S)
        self.forget_rows()
        if operation.future.done():
            operation.future.result()
        return operation

    def operation(self, name: str) -> Operation:
        found = self._operations.get(name)
        if found is None:
            raise error("SH601", f"there is no operation '{name[:50]}'", fix="See the state of the run.")
        return found

    def close(self) -> None:
        """Operations that watch `stopping` have a moment to tidy up. Others may end at any time, as if killed."""
        self.stopping.set()
        wait([one.future for one in self._operations.values()], timeout=CLOSE_S)
        self._pool.shutdown(wait=False, cancel_futures=True)


def _listed_row(row: dict[str, Any], tags: list[str]) -> dict[str, Any]:
    return {**row, "job": row["run"].rpartition("-")[0] or row["run"], "tags": tags}


def _open_history(paths: RunPaths) -> RunHistory:
    from shoal.storage.history import RunHistory  # loads numpy, which the start of the server does without

    return RunHistory(paths)


def _open_search(paths: RunPaths) -> FollowedSearch:
    from shoal.web.searches import FollowedSearch

    return FollowedSearch(paths)


def _is_directory(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.stat(path, follow_symlinks=False).st_mode)
    except (OSError, ValueError):
        return False


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(os.stat(path, follow_symlinks=False).st_mode)
    except (OSError, ValueError):
        return False
