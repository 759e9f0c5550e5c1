"""The file of a queue: where it lies, who may use it, and what is wrong with it."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ShoalError, error, is_disk_full
from shoal.jobs.run_dir import check_runs
from shoal.spec.private_file import PRIVATE_MODE, owner_if_other

APPLICATION_ID = 0x53484F51  # "SHOQ"
SCHEMA_VERSION = 6
BUSY_TIMEOUT_S = 30.0
NETWORK_FILE_SYSTEMS = re.compile(
    r"nfs4?|cifs|smb[23s]?\w*|afs|9p|ceph|glusterfs|lustre|gpfs|beegfs|virtiofs|fuse\.(?!fuse-overlayfs)[\w.-]+"
)
SCHEMA = """
CREATE TABLE job (
    id INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, name TEXT NOT NULL, user TEXT NOT NULL, priority
    INTEGER NOT NULL, after TEXT NOT NULL, needs TEXT NOT NULL, sha256 TEXT NOT NULL, state TEXT NOT NULL, reason
    TEXT NOT NULL, run TEXT NOT NULL, epoch INTEGER NOT NULL, attempts INTEGER NOT NULL, proven INTEGER NOT NULL,
    early_deaths INTEGER NOT NULL, cancel_requested INTEGER NOT NULL, workers INTEGER NOT NULL, overtaken INTEGER
    NOT NULL, blocked_by INTEGER NOT NULL, submitted_t REAL NOT NULL, started_t REAL NOT NULL, ended_t REAL NOT
    NULL, change INTEGER NOT NULL, fruitless INTEGER NOT NULL DEFAULT 0);
CREATE INDEX job_change ON job (change);
CREATE INDEX job_state ON job (state);
CREATE TABLE job_file (
    id INTEGER PRIMARY KEY REFERENCES job, content TEXT NOT NULL, work TEXT NOT NULL DEFAULT '');
CREATE TABLE dependency (after INTEGER NOT NULL, id INTEGER NOT NULL, PRIMARY KEY (after, id)) WITHOUT ROWID;
CREATE TABLE history (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id INTEGER NOT NULL, t REAL NOT NULL, state TEXT NOT NULL,
    workers INTEGER NOT NULL, epoch INTEGER NOT NULL, reason TEXT NOT NULL);
CREATE INDEX history_job ON history (id, seq);
CREATE TABLE speed (
    sha256 TEXT NOT NULL, workers INTEGER NOT NULL, steps INTEGER NOT NULL, seconds REAL NOT NULL,
    PRIMARY KEY (sha256, workers)) WITHOUT ROWID;
CREATE TABLE planned_speed (
    key TEXT NOT NULL, workers INTEGER NOT NULL, steps_per_s REAL NOT NULL, PRIMARY KEY (key, workers)) WITHOUT ROWID;
CREATE TABLE quota (user TEXT PRIMARY KEY, cores INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE lease (
    one INTEGER PRIMARY KEY CHECK (one = 1), epoch INTEGER NOT NULL, holder TEXT NOT NULL, pid INTEGER NOT NULL,
    beats INTEGER NOT NULL, stop_requested INTEGER NOT NULL);
INSERT INTO lease VALUES (1, 0, '', 0, 0, 0);
"""
MIGRATIONS = {
    1: "ALTER TABLE job ADD COLUMN kind TEXT NOT NULL DEFAULT 'training'",
    2: "ALTER TABLE job_file ADD COLUMN work TEXT NOT NULL DEFAULT ''",
    3: "SELECT 'the needs of newer jobs have more fields'",
    4: "CREATE TABLE planned_speed (key TEXT NOT NULL, workers INTEGER NOT NULL, steps_per_s REAL NOT NULL, "
    "PRIMARY KEY (key, workers)) WITHOUT ROWID",
    5: "ALTER TABLE job ADD COLUMN fruitless INTEGER NOT NULL DEFAULT 0",
}
"""What makes a file of each older version one of the next version."""


@dataclass(frozen=True)
class QueuePaths:
    """The private directory of a queue, beside the runs."""

    runs: Path

    @classmethod
    def of(cls, runs: Path) -> QueuePaths:
        return cls(check_runs(runs).resolve())

    @property
    def root(self) -> Path:
        return self.runs / ".queue"

    @property
    def file(self) -> Path:
        return self.root / "queue.sqlite"

    @property
    def lock(self) -> Path:
        """Held by the daemon while it lives."""
        return self.root / "daemon.lock"

    @property
    def served_with(self) -> Path:
        """The options of the last daemon that decided where jobs run."""
        return self.root / "served-with"

    @property
    def log(self) -> Path:
        return self.root / "daemon.log"


def open_queue_file(paths: QueuePaths, *, create: bool = True) -> sqlite3.Connection:
    """A connection of this thread. SH642 to SH645 if the file cannot be used; then it is left as it is."""
    refuse_network_file_system(paths)
    with translated_errors(paths):
        _make_private(paths, create=create)
        connection = sqlite3.connect(paths.file, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        try:
            _prepare(connection, paths)
        except BaseException:
            connection.close()
            raise
        return connection


def refuse_network_file_system(paths: QueuePaths) -> None:
    """SQLite's log of writes needs memory that all processes share: it cannot lie on a file system of the network."""
    kind = file_system_of(paths.root, Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace"))
    if NETWORK_FILE_SYSTEMS.fullmatch(kind):
        fix = "Give a directory on a disk of this machine: --runs DIR. Checkpoints may lie elsewhere: checkpoint.path."
        raise error("SH643", f"{paths.runs} is on {kind}", where=str(paths.file), fix=fix)


def file_system_of(path: Path, mountinfo: str) -> str:
    """The kind of the file system that a path is on, from the text of /proc/self/mountinfo; '' if it is not there."""
    best, kind = -1, ""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        words, after = left.split(), right.split()
        if len(words) < 5 or not after:
            continue
        mount = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), words[4])
        if path.is_relative_to(mount) and len(mount) >= best:  # a later mount hides an earlier one
            best, kind = len(mount), after[0]
    return kind


@contextlib.contextmanager
def translated_errors(paths: QueuePaths) -> Iterator[None]:
    """SQLite's errors as errors with a fix."""
    try:
        yield
    except sqlite3.Error as failure:
        raise _explain(failure, paths) from failure
    except (UnicodeError, OverflowError) as failure:  # text or numbers that cannot be
        raise damaged(paths, str(failure)) from failure
    except OSError as failure:
        if is_disk_full(failure):
            raise error("SH510", str(failure), where=str(paths.root)) from failure
        raise error("SH642", f"{paths.root}: {failure.strerror}", where=str(paths.root)) from failure


@contextlib.contextmanager
def sound_rows(paths: QueuePaths, what: str = "a row") -> Iterator[None]:
    """Around reading the values of rows: SH644 if they cannot be."""
    try:
        yield
    except (ShoalError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as failure:
        raise damaged(paths, f"{what} cannot be read: {failure}") from failure


def _explain(failure: sqlite3.Error, paths: QueuePaths) -> ShoalError:
    where, what = str(paths.file), str(failure)
    code = getattr(failure, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL:
        return error("SH510", what, where=where)
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_IOERR):
        return error("SH642", what, where=where)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        fix = "Another process holds it: wait for it, or end it. Nothing was changed."
        return error("SH642", f"no answer in {BUSY_TIMEOUT_S:g} s: {what}", where=where, fix=fix)
    return damaged(paths, what)


def damaged(paths: QueuePaths, what: str) -> ShoalError:
    return error("SH644", what, where=str(paths.file))


def _make_private(paths: QueuePaths, *, create: bool) -> None:
    """Never opens the file: the kernel takes all locks of a process from it when the process closes it anywhere. Then
    another process that closes the queue would count as the last one, and remove the log that this process writes."""
    if create:
        paths.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileExistsError):
            os.mknod(paths.file, PRIVATE_MODE | stat.S_IFREG)
    found = os.lstat(paths.file)
    if stranger := owner_if_other(found):
        raise error("SH642", f"it belongs to {stranger}", where=str(paths.file))
    if not stat.S_ISREG(found.st_mode):
        raise error("SH642", "it is not a file", where=str(paths.file))


def _prepare(connection: sqlite3.Connection, paths: QueuePaths) -> None:
    version = _version(connection, paths)
    if version is None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("BEGIN IMMEDIATE")
        if _version(connection, paths) is None:  # else another process has just made it
            for statement in SCHEMA.split(";\n"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        connection.execute("COMMIT")
    elif version < SCHEMA_VERSION:
        connection.execute("BEGIN IMMEDIATE")
        for older in range(_version(connection, paths) or SCHEMA_VERSION, SCHEMA_VERSION):
            connection.execute(MIGRATIONS[older])
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        connection.execute("COMMIT")
    connection.execute("PRAGMA synchronous=FULL")


def _version(connection: sqlite3.Connection, paths: QueuePaths) -> int | None:
    """The version of the file's schema; None for a new file."""
    application, version, tables = (
        connection.execute(query).fetchone()[0]
        for query in ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_master")
    )
    if application == 0 and tables == 0:
        return None
    if application != APPLICATION_ID:
        raise damaged(paths, "it is not a queue of Shoal")
    if version > SCHEMA_VERSION:
        raise error("SH645", f"its version is {version}; this program knows {SCHEMA_VERSION}", where=str(paths.file))
    return int(version)
