"""The queue as typed rows. Every change is one transaction: it is there as a whole, or not at all."""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from shoal.errors import error
from shoal.events.checks import MAX_INT
from shoal.jobs.queue.queue_file import QueuePaths, damaged, open_queue_file, sound_rows, translated_errors
from shoal.plan.queueing.entry import EntryState, QueueEntry
from shoal.plan.queueing.lease import Lease
from shoal.plan.queueing.needs import needs_of
from shoal.plan.queueing.speed import Measured
from shoal.plan.queueing.transitions import StaleEpochError, follow_predecessors
from shoal.plan.queueing.work import TRAINING, WORK, Work
from shoal.spec.base import Spec
from shoal.spec.job import Job
from shoal.spec.load import make_job
from shoal.spec.migrate import migrate_job

S = TypeVar("S", bound=Spec)
MAX_HISTORY_ROWS = 10_000
"""Rows of history that are read at a time. All are kept."""
_FIELDS = tuple(name for name in QueueEntry.model_fields if name != "id")
_SELECT = " ".join(["SELECT", ", ".join(["id", *_FIELDS]), "FROM job"])
_INSERT = " ".join(["INSERT INTO job (", ", ".join(_FIELDS), ") VALUES (", ", ".join("?" * len(_FIELDS)), ")"])
_UPDATE = " ".join(["UPDATE job SET", ", ".join(f"{name} = ?" for name in _FIELDS), "WHERE id = ?"])
_HISTORY = "SELECT id, t, state, workers, epoch, reason FROM history"


class HistoryRow(Spec):
    """A change of an entry. `t` is the time of the wall, for people only."""

    id: int
    t: float
    state: EntryState
    workers: int
    epoch: int
    reason: str


class QueueStore:
    """Belongs to one thread. Several processes may have one each; SQLite keeps their changes apart."""

    def __init__(self, paths: QueuePaths, *, create: bool = True) -> None:
        self.paths = paths
        self._connection = open_queue_file(paths, create=create)
        self._seen_version = -1

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> QueueStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- for users ----

    def submit(
        self,
        jobs: Iterable[Job],
        *,
        user: str,
        priority: int = 0,
        after: Iterable[int] = (),
        work: Work = TRAINING,
    ) -> list[QueueEntry]:
        """Add checked jobs, all or none. SH646 if one that they come after does not exist."""
        follows = tuple(sorted(set(after)))
        made = []
        with self._transaction():
            before = [self.get(number) for number in follows]
            for job in jobs:
                entry = self._insert(job, work, user=user, priority=priority, after=follows)
                made.append(self._write(entry, follow_predecessors(entry, before)))
        return made

    def get(self, number: int) -> QueueEntry:
        """SH646 if there is no such job."""
        found = self._read(_SELECT + " WHERE id = ?", number) if 0 < number < MAX_INT else []
        if not found:
            raise error("SH646", f"there is no job {number} in the queue", where=str(self.paths.file))
        return found[0]

    def entries(self, *, since_change: int = 0) -> list[QueueEntry]:
        """The entries that changed after the given number of changes, in order of submission."""
        return self._read(_SELECT + " WHERE change > ? ORDER BY id", since_change)

    def job(self, number: int) -> Job:
        """The job as it was submitted."""
        with translated_errors(self.paths):
            row = self._connection.execute("SELECT content FROM job_file WHERE id = ?", (number,)).fetchone()
        if row is None:
            raise damaged(self.paths, f"the job of entry {number} is missing")
        with sound_rows(self.paths, f"the job of entry {number}"):
            data = migrate_job(json.loads(row[0]))
            return make_job(data, base_dir=data["base_dir"], check_names=False)

    def work(self, number: int) -> Work:
        """What is to be done with the job."""
        with translated_errors(self.paths):
            row = self._connection.execute("SELECT work FROM job_file WHERE id = ?", (number,)).fetchone()
        content = row[0] if row and row[0] else json.dumps({"kind": self.get(number).kind})
        with sound_rows(self.paths, f"the work of entry {number}"):
            return WORK.validate_json(content)

    def history(self, number: int | None = None) -> list[HistoryRow]:
        """What happened to one job, or the newest rows of all; the oldest first."""
        query = _HISTORY + ("" if number is None else " WHERE id = ?") + " ORDER BY seq DESC LIMIT ?"
        with translated_errors(self.paths):
            arguments = (MAX_HISTORY_ROWS,) if number is None else (number, MAX_HISTORY_ROWS)
            rows = reversed(self._connection.execute(query, arguments).fetchall())
        return [self._checked(HistoryRow, row) for row in rows]

    def apply(self, number: int, change: Callable[[QueueEntry], QueueEntry], *, epoch: int | None = None) -> QueueEntry:
        """Change an entry by a transition, and the entries that come after it.

        A daemon passes its epoch: StaleEpochError, and no change, if it no longer has the lease.
        """
        with self._transaction():
            if epoch is not None:
                self._require_lease(epoch)
            entry = self.get(number)
            return self._write(entry, change(entry))

    # ---- for the daemon ----

    def apply_all(self, changes: Mapping[int, Callable[[QueueEntry], QueueEntry]], *, epoch: int) -> None:
        """Change several entries by transitions, in one transaction."""
        with self._transaction():
            self._require_lease(epoch)
            for number, change in changes.items():
                entry = self.get(number)
                self._write(entry, change(entry))

    def has_changed(self) -> bool:
        """Whether another process has changed the queue since the last call."""
        with translated_errors(self.paths):
            version = self._connection.execute("PRAGMA data_version").fetchone()[0]
        changed = version != self._seen_version
        self._seen_version = version
        return bool(changed)

    def lease(self) -> Lease:
        with translated_errors(self.paths):
            query = "SELECT epoch, holder, pid, beats, stop_requested FROM lease"
            row = self._connection.execute(query).fetchone()
        if row is None:
            raise damaged(self.paths, "it has no lease")
        return self._checked(Lease, row)

    def change_lease(self, change: Callable[[Lease], Lease], *, expected: Lease | None = None, epoch: int = 0) -> Lease:
        """Change the lease. StaleEpochError if it is not the `expected` one, or not of this epoch."""
        with self._transaction():
            present = self.lease()
            if (expected is not None and present != expected) or (epoch and present.epoch != epoch):
                raise StaleEpochError(f"the lease is of epoch {present.epoch}")
            new = change(present)
            self._connection.execute(
                "UPDATE lease SET epoch = ?, holder = ?, pid = ?, beats = ?, stop_requested = ?",
                (new.epoch, new.holder, new.pid, new.beats, new.stop_requested),
            )
        return new

    def release_lease_if_idle(self, epoch: int, *, is_idle: Callable[[], bool]) -> bool:
        """Give the lease back unless there is something to do. A job submitted later finds no holder and starts a
        daemon."""
        with self._transaction():
            self._require_lease(epoch)
            if not is_idle():
                return False
            self._connection.execute("UPDATE lease SET holder = '', pid = 0, stop_requested = 0")
        return True

    def check(self) -> None:
        """SH644 if SQLite finds damage in the file."""
        with translated_errors(self.paths):
            said = self._connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if said != "ok":
            raise damaged(self.paths, str(said))

    def add_speeds(self, sha256: str, measured: Mapping[int, Measured]) -> None:
        """Add what an attempt measured to what is known of equal jobs."""
        with self._transaction():
            for workers, one in measured.items():
                self._connection.execute(
                    "INSERT INTO speed VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE "
                    "SET steps = steps + excluded.steps, seconds = seconds + excluded.seconds",
                    (sha256, workers, one.steps, one.seconds),
                )

    def speeds(self, sha256: str) -> dict[int, Measured]:
        """What earlier attempts of equal jobs measured, by number of workers."""
        with translated_errors(self.paths):
            query = "SELECT workers, steps, seconds FROM speed WHERE sha256 = ?"
            rows = self._connection.execute(query, (sha256,)).fetchall()
        with sound_rows(self.paths):
            return {int(workers): Measured(int(steps), float(seconds)) for workers, steps, seconds in rows}

    def set_planned_speeds(self, key: str, speeds: Mapping[int, float]) -> None:
        """Replace what an earlier plan predicted of such jobs: steps per second by number of workers."""
        with self._transaction():
            self._connection.execute("DELETE FROM planned_speed WHERE key = ?", (key,))
            for workers, steps_per_s in speeds.items():
                self._connection.execute("INSERT INTO planned_speed VALUES (?, ?, ?)", (key, workers, steps_per_s))

    def planned_speeds(self, key: str) -> dict[int, float]:
        with translated_errors(self.paths):
            query = "SELECT workers, steps_per_s FROM planned_speed WHERE key = ?"
            rows = self._connection.execute(query, (key,)).fetchall()
        with sound_rows(self.paths, "a planned speed"):
            found = {int(workers): float(speed) for workers, speed in rows}
            if not all(workers > 0 and 0 < speed < math.inf for workers, speed in found.items()):
                raise ValueError(f"{found} are no speeds")
            return found

    def set_quota(self, user: str, cores: int | None) -> None:
        """At most so many cores at a time for the jobs of a user; None: no limit."""
        with self._transaction():
            self._connection.execute("DELETE FROM quota WHERE user = ?", (user,))
            if cores is not None:
                self._connection.execute("INSERT INTO quota VALUES (?, ?)", (user, cores))

    def quotas(self) -> dict[str, int]:
        with translated_errors(self.paths), sound_rows(self.paths):
            return {str(user): int(n) for user, n in self._connection.execute("SELECT user, cores FROM quota")}

    # ---- implementation ----

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with translated_errors(self.paths):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                raise

    def _require_lease(self, epoch: int) -> None:
        present = self.lease()
        if present.epoch != epoch:
            raise StaleEpochError(f"the lease is of epoch {present.epoch}, not {epoch}")

    def _read(self, query: str, *arguments: Any) -> list[QueueEntry]:
        with translated_errors(self.paths):
            rows = self._connection.execute(query, arguments).fetchall()
        with sound_rows(self.paths):
            return [_entry(row) for row in rows]

    def _checked(self, kind: type[S], row: Sequence[Any]) -> S:
        with sound_rows(self.paths):
            return kind.model_validate(dict(zip(kind.model_fields, row, strict=True)))

    def _insert(self, job: Job, work: Work, *, user: str, priority: int, after: tuple[int, ...]) -> QueueEntry:
        now = time.time()
        fields: dict[str, Any] = {
            "name": job.name, "user": user, "priority": priority, "after": after, "needs": needs_of(job, work),
            "kind": work.kind, "sha256": job.sha256(), "submitted_t": now, "change": self._next_change(),
        }  # fmt: skip
        draft = QueueEntry(id=1, **fields)
        cursor = self._connection.execute(_INSERT, _row(draft))
        entry = draft.model_copy(update={"id": cursor.lastrowid})
        content = (entry.id, json.dumps(job.dump()), work.model_dump_json())
        self._connection.execute("INSERT INTO job_file (id, content, work) VALUES (?, ?, ?)", content)
        self._connection.executemany("INSERT INTO dependency VALUES (?, ?)", [(one, entry.id) for one in after])
        self._note(entry)
        return entry

    def _write(self, old: QueueEntry, new: QueueEntry) -> QueueEntry:
        """Write a changed entry; then the entries that come after it follow, however long the chain is."""
        if new == old:
            return old
        written = self._write_one(old, new)
        changed = deque([written] if old.state != new.state else [])
        while changed:
            for follower in self._followers(changed.popleft().id):
                before = [self.get(number) for number in follower.after]
                follows = follow_predecessors(follower, before)
                if follows != follower:
                    self._write_one(follower, follows)
                if follows.state != follower.state:
                    changed.append(follows)
        return written

    def _write_one(self, old: QueueEntry, new: QueueEntry) -> QueueEntry:
        new = new.model_copy(update={"change": self._next_change(), **_times(old, new)})
        self._connection.execute(_UPDATE, (*_row(new), new.id))
        if (old.state, old.workers) != (new.state, new.workers):
            self._note(new)
        return new

    def _followers(self, number: int) -> list[QueueEntry]:
        rows = self._connection.execute("SELECT id FROM dependency WHERE after = ?", (number,)).fetchall()
        return [self.get(follower) for (follower,) in rows]

    def _note(self, entry: QueueEntry) -> None:
        self._connection.execute(
            "INSERT INTO history (id, t, state, workers, epoch, reason) VALUES (?, ?, ?, ?, ?, ?)",
            (entry.id, time.time(), entry.state, entry.workers, entry.epoch, entry.reason),
        )

    def _next_change(self) -> int:
        return int(self._connection.execute("SELECT coalesce(max(change), 0) + 1 FROM job").fetchone()[0])


def _times(old: QueueEntry, new: QueueEntry) -> dict[str, float]:
    """Times of the wall that a change of state sets."""
    now = time.time()
    started = {"started_t": now} if new.state == "running" and not old.started_t else {}
    return started | ({"ended_t": now} if new.has_ended and not old.has_ended else {})


def _row(entry: QueueEntry) -> list[Any]:
    values = {**entry.model_dump(mode="json"), "after": json.dumps(entry.after), "needs": entry.needs.model_dump_json()}
    return [values[name] for name in _FIELDS]


def _entry(row: tuple[Any, ...]) -> QueueEntry:
    fields = dict(zip(("id", *_FIELDS), row, strict=True))
    fields |= {"after": json.loads(fields["after"]), "needs": json.loads(fields["needs"])}
    return QueueEntry.model_validate(fields)
