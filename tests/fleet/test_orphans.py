"""Who outlived the driver is found by the lock that it holds."""

import fcntl
import os

from shoal.fleet.orphans import Orphan, find_orphans
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import Seat


def test_those_who_live_are_found_by_role_and_the_locks_of_others_go(tmp_path):
    paths = RunPaths(tmp_path)
    (tmp_path / ".seat-x.lock").touch()
    paths.seat_lock(1).write_text("12345")
    with paths.seat_lock(10).open("w") as worker, paths.seat_lock(2, "server").open("w") as server:
        for lock in (worker, server):
            lock.write(str(os.getpid()))
            lock.flush()
            fcntl.flock(lock, fcntl.LOCK_EX)
        assert find_orphans(paths) == [
            Orphan(Seat(number=2, role="server"), os.getpid()),
            Orphan(Seat(number=10), os.getpid()),
        ]
    assert not paths.seat_lock(1).exists()
    assert find_orphans(paths) == []
    assert [file.name for file in tmp_path.iterdir()] == [".seat-x.lock"]
