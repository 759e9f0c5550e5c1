import contextlib
import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.errors import ShoalError
from shoal.jobs.queue import client
from shoal.jobs.queue.daemon_lock import daemon_lock
from shoal.jobs.queue.queue_file import (
    NETWORK_FILE_SYSTEMS,
    QueuePaths,
    file_system_of,
    open_queue_file,
    refuse_network_file_system,
)
from shoal.jobs.queue.queue_store import QueueStore
from shoal.jobs.remote.code_archive import pack_code
from shoal.plan.queueing import transitions
from shoal.plan.queueing.speed import Measured
from shoal.plan.queueing.work import TRAINING
from shoal.spec.load import save_job

MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:40 / /home rw shared:3 master:1 - nfs4 server:/home rw,vers=4.2
31 30 0:41 / /home/ann/my\\040disk rw - xfs /dev/vdb rw
32 22 0:42 / /mnt/ssh rw - fuse.sshfs host: rw
"""


def code_of(call, *arguments, **named):
    with pytest.raises(ShoalError) as caught:
        call(*arguments, **named)
    return caught.value.code


def test_a_job_comes_back_as_it_was_submitted(store, job):
    made = job(name="first", workers="1..3", threads=2)
    (entry,) = store.submit([made], user="ann", priority=5)
    assert (entry.id, entry.state, entry.user, entry.priority) == (1, "waiting", "ann", 5)
    assert (entry.needs.least, entry.needs.most, entry.needs.cores, entry.needs.lanes) == (1, 3, 2, 4)
    assert store.job(1) == made
    assert store.get(1) == entry == store.entries()[0]


def test_only_the_owner_may_read_the_queue(store, paths):
    assert stat.S_IMODE(os.stat(paths.root).st_mode) == 0o700
    for file in paths.root.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_history_is_kept(store, job):
    store.submit([job()], user="ann")
    store.change_lease(lambda old: old.taken(holder="x", pid=1))
    store.apply(1, lambda e: transitions.claim(e, epoch=1, run="mlp-1"), epoch=1)
    store.apply(1, lambda e: transitions.resize(e, epoch=1, workers=2, why="room"), epoch=1)
    store.apply(1, lambda e: transitions.fail(e, epoch=1, why="SH401: it failed"), epoch=1)
    rows = store.history(1)
    assert [(row.state, row.workers, row.reason) for row in rows] == [
        ("waiting", 0, ""), ("running", 0, ""), ("running", 2, "room"), ("failed", 0, "SH401: it failed"),
    ]  # fmt: skip


def test_jobs_that_come_after_follow_at_any_depth(store, job):
    store.submit([job()], user="a")
    for before in (1, 2):
        store.submit([job()], user="a", after=[before])
    store.change_lease(lambda old: old.taken(holder="x", pid=1))
    store.apply(1, lambda e: transitions.claim(e, epoch=1, run="r"))
    store.apply(1, lambda e: transitions.fail(e, epoch=1, why="x"))
    assert [store.get(n).state for n in (2, 3)] == ["held", "held"]
    assert store.get(2).reason == "job 1, which it comes after, failed"
    store.apply(1, transitions.release)
    assert [store.get(n).state for n in (1, 2, 3)] == ["waiting"] * 3
    store.apply(1, transitions.request_cancel)
    assert [store.get(n).state for n in (1, 2, 3)] == ["cancelled"] * 3
    (late,) = store.submit([job()], user="a", after=[3])
    assert late.state == "cancelled"


def test_a_chain_of_2000_jobs_follows_its_first_one(store, job):
    length, made = 2000, job()
    store.submit([made], user="a")
    with store._transaction():  # one for all: each alone waits for the disk
        for before in range(1, length):
            store._insert(made, TRAINING, user="a", priority=0, after=(before,))
    store.apply(1, transitions.request_cancel)
    assert {entry.state for entry in store.entries()} == {"cancelled"}
    assert store.get(length).reason == f"job {length - 1}, which it comes after, was cancelled"


def test_an_unknown_predecessor_is_refused_and_nothing_is_added(store, job):
    assert code_of(store.submit, [job()], user="a", after=[7]) == "SH646"
    assert store.entries() == []


def test_a_daemon_that_was_replaced_changes_nothing(store, job):
    store.submit([job()], user="a")
    store.change_lease(lambda old: old.taken(holder="first", pid=1))
    store.apply(1, lambda e: transitions.claim(e, epoch=1, run="r"), epoch=1)
    store.change_lease(lambda old: old.taken(holder="second", pid=2))
    before = store.entries()
    with pytest.raises(transitions.StaleEpochError):
        store.apply(1, lambda e: transitions.finish(e, epoch=1), epoch=1)
    with pytest.raises(transitions.StaleEpochError):
        store.change_lease(lambda old: old.renewed(), epoch=1)
    with pytest.raises(transitions.StaleEpochError):
        store.release_lease_if_idle(1, is_idle=lambda: True)
    assert store.entries() == before


def test_another_process_sees_changes_and_only_changes(store, paths, job):
    store.has_changed()
    assert not store.has_changed()
    with QueueStore(paths) as other:
        other.submit([job()], user="a")
    assert store.has_changed()
    assert not store.has_changed()
    last = store.entries()[-1].change
    assert store.entries(since_change=last) == []


LOOK = """
import sys
from pathlib import Path
from shoal.jobs.queue import client
print(len(client.look(Path(sys.argv[1])).entries))
"""


def test_the_code_of_a_job_beside_the_queue_is_packed_without_loss_of_the_locks(store, paths, job, tmp_path):
    """The kernel takes all locks of a process from a file that the process closes. Another process that closes the
    queue would then take itself for the last one, and remove the log with the changes of this one."""

    def look():
        return subprocess.run([sys.executable, "-c", LOOK, paths.runs], capture_output=True, text=True).stdout.strip()

    (paths.runs.parent / "model.py").touch()
    store.submit([job()], user="ann")
    pack_code(paths.runs.parent, tmp_path / "out")
    assert look() == "1"
    store.submit([job()], user="ann")
    assert look() == "2"


def test_planned_speeds_are_replaced(store):
    store.set_planned_speeds("abc", {1: 10.0, 2: 19.0})
    store.set_planned_speeds("abc", {1: 12.0})
    assert store.planned_speeds("abc") == {1: 12.0}
    assert store.planned_speeds("xyz") == {}


@pytest.mark.parametrize("speed", [0.0, -1.0, float("inf"), "fast"])
def test_planned_speeds_that_cannot_be_are_damage(store, speed):
    store._connection.execute("INSERT INTO planned_speed VALUES ('abc', 1, ?)", (speed,))
    with pytest.raises(ShoalError, match="SH644"):
        store.planned_speeds("abc")


def test_measured_speeds_add_up(store):
    store.add_speeds("abc", {1: Measured(10, 2.0)})
    store.add_speeds("abc", {1: Measured(10, 3.0), 2: Measured(5, 1.0)})
    assert store.speeds("abc") == {1: Measured(20, 5.0), 2: Measured(5, 1.0)}


def test_quotas_are_kept(store):
    store.set_quota("ann", 4)
    store.set_quota("bob", 2)
    store.set_quota("bob", None)
    assert store.quotas() == {"ann": 4}


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/srv/runs", "ext4"),
        ("/home/ann/runs", "nfs4"),
        ("/home/ann/my disk/x", "xfs"),
        ("/mnt/ssh", "fuse.sshfs"),
    ],
)
def test_the_file_system_of_a_path_is_that_of_the_nearest_mount(path, kind):
    assert file_system_of(Path(path), MOUNTS) == kind


def test_a_network_file_system_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    mounts = f"1 0 0:1 / / rw - ext4 x rw\n2 1 0:2 / {tmp_path} rw - nfs4 server:/x rw\n"
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self, **named: mounts if self.name == "mountinfo" else read(self))
    paths = QueuePaths.of(tmp_path / "runs")
    assert code_of(refuse_network_file_system, paths) == code_of(QueueStore, paths) == "SH643"
    assert code_of(daemon_lock(paths).__enter__) == "SH643"
    assert not paths.root.exists()


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "cifs", "smb3", "ceph", "fuse.sshfs", "fuse.ceph-fuse", "fuse.fuse-nfs"]
)
def test_kinds_of_network_file_systems(kind):
    assert NETWORK_FILE_SYSTEMS.fullmatch(kind)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "fuseblk", "fuse.fuse-overlayfs"])
def test_kinds_of_local_file_systems(kind):
    assert not NETWORK_FILE_SYSTEMS.fullmatch(kind)


@pytest.mark.parametrize("content", [b"long enough to be looked at" * 60, b"SQLite format 3\0xx"])
def test_a_file_that_is_no_queue_is_left_as_it_is(paths, content):
    paths.root.mkdir(parents=True)
    paths.file.write_bytes(content)
    assert code_of(QueueStore, paths) == "SH644"
    assert paths.file.read_bytes() == content


def test_a_database_of_another_program_and_a_newer_queue_are_refused(paths):
    paths.root.mkdir(parents=True)
    with sqlite3.connect(paths.file) as connection:
        connection.execute("CREATE TABLE recipes (name)")
    connection.close()
    assert code_of(QueueStore, paths) == "SH644"
    paths.file.unlink()
    QueueStore(paths).close()
    with sqlite3.connect(paths.file) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    assert code_of(QueueStore, paths) == "SH645"


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_queue_is_an_error_or_reads_valid_rows_and_never_anything_else(tmp_path_factory, job, data):
    paths = QueuePaths.of(tmp_path_factory.mktemp("damaged") / "runs")
    with QueueStore(paths) as store:
        store.submit([job()] * 3, user="ann")
        store._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = bytearray(paths.file.read_bytes())
    for _ in range(data.draw(st.integers(1, 20))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    paths.file.write_bytes(content)
    with contextlib.suppress(ShoalError), QueueStore(paths) as store:  # any other exception fails the test
        store.check()
        for entry in store.entries():
            store.job(entry.id)
        store.lease()


WRONG = (None, "text", "", -1, 2**62, 1e308, b"\xff", "[" * 100_000, '{"a": 1}', "[1]", '"\\ud800"', "Infinity")


def test_a_wrong_value_in_any_column_is_an_error_and_never_anything_else(paths, job):
    with QueueStore(paths) as store:
        store.submit([job()], user="ann")
        store.set_quota("ann", 2)
        store.add_speeds(store.get(1).sha256, {2: Measured(5, 1.0)})
    every = sqlite3.connect(paths.file, isolation_level=None)
    tables = [name for (name,) in every.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    places = [(table, row[1]) for table in tables for row in every.execute(f"PRAGMA table_info({table})")]
    assert {"job", "history", "lease", "job_file"} <= set(tables)
    for table, column in places:
        kept = every.execute(f"SELECT {column} FROM {table}").fetchone()
        for value in WRONG if kept else ():
            with contextlib.suppress(sqlite3.Error):
                every.execute(f"UPDATE {table} SET {column} = ?", (value,))
            for read in READS:
                with contextlib.suppress(ShoalError):
                    read(paths)
        if kept:
            every.execute(f"UPDATE {table} SET {column} = ?", kept)
    every.close()
    assert client.look(paths.runs).entries[1].user == "ann"


def read_all(paths):
    with QueueStore(paths) as store:
        for entry in store.entries():
            store.job(entry.id), store.work(entry.id), store.speeds(entry.sha256)


READS = (
    read_all, lambda paths: client.look(paths.runs), lambda paths: client.read_history(paths.runs),
    lambda paths: client.read_history(paths.runs, 1), lambda paths: QueueStore(paths).lease(),
)  # fmt: skip


READ_ONLY = """
import subprocess, sys
queue, runs, job = sys.argv[1:]
subprocess.run(["mount", "--bind", "-o", "ro", queue, queue], check=True)
subprocess.run(["mount", "-o", "remount,bind,ro", queue], check=True)
for words in (["cancel", "1"], ["priority", "1", "5"], ["submit", job], ["up"]):
    done = subprocess.run([sys.executable, "-m", "shoal", *words, "--runs", runs], capture_output=True, text=True)
    print(done.returncode != 0, (done.stdout + done.stderr)[:5])
"""


def test_a_queue_that_cannot_be_written_says_so_and_keeps_its_jobs(paths, job, tmp_path):
    """As its owner, and as root, on a file system that is mounted for reading only."""
    save_job(job(), tmp_path / "job.yaml")
    with QueueStore(paths) as store:
        store.submit([job()], user="ann")
    before = paths.file.read_bytes()
    words = [sys.executable, "-c", READ_ONLY, str(paths.root), str(paths.runs), str(tmp_path / "job.yaml")]
    done = subprocess.run(["unshare", "-rm", *words], capture_output=True, text=True, check=False)
    if "unshare" in done.stderr:
        pytest.skip("this machine has no user namespaces")
    assert done.stdout.splitlines() == ["True SH642"] * 4, done
    assert paths.file.read_bytes() == before
    with QueueStore(paths) as store:
        assert store.get(1).state == "waiting"


def test_a_full_disk_is_told_and_nothing_is_half_written(store, job):
    store.submit([job()], user="ann")
    store._connection.execute("PRAGMA max_page_count = 1")
    assert code_of(store.submit, [job()] * 500, user="ann") == "SH510"
    assert len(store.entries()) == 1


def test_opening_for_reading_makes_nothing(paths):
    assert code_of(open_queue_file, paths, create=False) == "SH642"
    assert not paths.root.exists()


def test_a_second_connection_of_a_process_leaves_the_locks_of_the_first(paths):
    """Otherwise another process that closes the file takes itself for the last one, and removes the log of writes."""
    other = (
        "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('SELECT * FROM lease').fetchall(); c.close()"
    )
    with QueueStore(paths) as first:
        first.set_quota("ann", 1)
        with QueueStore(paths) as second:
            second.quotas()
        subprocess.run([sys.executable, "-c", other, str(paths.file)], check=True)
        first.set_quota("ann", 7)
        with contextlib.closing(sqlite3.connect(paths.file)) as seen:
            assert seen.execute("SELECT cores FROM quota").fetchall() == [(7,)]
