"""Lock files are their owner's alone: nobody else can hold up a run."""

import fcntl
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from shoal.checkpoint.files import LOCK_FILE, LocalFiles
from shoal.data.cache import cached_directory
from shoal.errors import ShoalError
from shoal.fleet.orphans import find_orphans
from shoal.fleet.process_main import hold_seat_lock
from shoal.jobs import run_dir
from shoal.spec.private_file import open_lock_file
from shoal.spec.run_paths import RunPaths

NOBODY = 65534
LOCK_AS_NOBODY = f"""
import fcntl, os, sys
os.setgid({NOBODY}); os.setuid({NOBODY})
try:
    file = open(sys.argv[1])
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    print("locked")
except OSError as failure:
    print(type(failure).__name__)
"""


@pytest.fixture
def paths(tmp_path):
    return RunPaths.at(tmp_path)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_every_lock_of_a_run_has_mode_0600(paths, tmp_path):
    old = os.umask(0)
    try:
        with run_dir.driver_lock(paths), hold_seat_lock(paths, 3), LocalFiles(str(tmp_path / "store")).save_lock():
            cached_directory(tmp_path / "cache", ["a"], lambda directory: None)
            locks = [paths.lock, paths.seat_lock(3), tmp_path / "store" / LOCK_FILE, *tmp_path.glob("cache/*.lock")]
            assert [mode(lock) for lock in locks] == [0o600] * 4
    finally:
        os.umask(old)


def test_a_lock_of_an_earlier_version_becomes_private(paths):
    paths.lock.write_text("123")
    paths.lock.chmod(0o644)
    with run_dir.driver_lock(paths):
        assert (mode(paths.lock), paths.lock.read_text()) == (0o600, str(os.getpid()))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_cannot_take_the_lock():
    directory = Path(tempfile.mkdtemp(prefix="shoal-lock-"))  # unlike pytest's, others may enter it
    try:
        directory.chmod(0o755)
        paths = RunPaths.at(directory)
        with run_dir.driver_lock(paths):
            pass

        def try_to_lock():
            command = [sys.executable, "-c", LOCK_AS_NOBODY, str(paths.lock)]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

        assert try_to_lock() == "PermissionError"
        paths.lock.chmod(0o644)
        assert try_to_lock() == "locked", "else the test says nothing"
    finally:
        shutil.rmtree(directory)


def test_a_lock_of_another_user_is_refused(paths, monkeypatch):
    paths.lock.touch()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="belongs to "):
        open_lock_file(paths.lock)
    with pytest.raises(ShoalError, match=r"SH626.*\.lock: .*belongs to .*chown"), run_dir.driver_lock(paths):
        pass
    paths.seat_lock(1).touch()
    assert find_orphans(paths) == []


def test_a_link_is_refused(paths, tmp_path):
    (tmp_path / "else").touch()
    paths.lock.symlink_to(tmp_path / "else")
    with pytest.raises(ShoalError, match=r"SH626.*is a link"), run_dir.driver_lock(paths):
        pass


def test_a_question_whether_a_run_is_driven_does_not_keep_a_driver_out(paths):
    """A process that asks holds the lock for a moment."""
    paths.lock.touch()
    asking = paths.lock.open()
    fcntl.flock(asking, fcntl.LOCK_SH)
    threading.Timer(0.05, asking.close).start()
    with run_dir.driver_lock(paths):
        assert run_dir.is_driven(paths)
    assert not run_dir.is_driven(paths)


def test_a_second_driver_is_told_of_the_first(paths, monkeypatch):
    monkeypatch.setattr(run_dir, "LOCK_TIMEOUT_S", 0.0)
    with run_dir.driver_lock(paths):
        with pytest.raises(ShoalError, match=rf"SH602.*driven by process {os.getpid()}"), run_dir.driver_lock(paths):
            pass
        paths.lock.write_text("\x1b[2J")
        with pytest.raises(ShoalError, match=r"SH602.*driven by another process"), run_dir.driver_lock(paths):
            pass


@pytest.mark.parametrize("content", ["", "\0\0", "-1", "0", "9" * 5000, "many", "1e9"])
def test_a_seat_lock_without_a_process_number_is_nobody(paths, content):
    lock = paths.seat_lock(2)
    lock.write_text(content)
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert find_orphans(paths) == []
    lock.write_text("77")
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert [(one.seat.name, one.pid) for one in find_orphans(paths)] == [("worker-2", 77)]
