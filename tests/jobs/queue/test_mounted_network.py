"""Queues on file systems that are really mounted over a network: sshfs, from an ssh server on loopback."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.jobs.queue.queue_file import QueuePaths, file_system_of
from shoal.jobs.queue.queue_store import QueueStore
from shoal.spec.load import save_job
from tests.fleet.ssh_server import SSHD, ssh_server

pytestmark = [
    pytest.mark.ssh,
    pytest.mark.skipif(SSHD is None or shutil.which("sshfs") is None, reason="no sshfs: tools/install_sshd.sh"),
    pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="this user may not mount with FUSE"),
]


@pytest.fixture
def shared(tmp_path):
    """A directory of the "server", and where it is mounted."""
    there, here = tmp_path / "server", tmp_path / "mounted"
    there.mkdir()
    here.mkdir()
    (tmp_path / "ssh").mkdir()
    with ssh_server(tmp_path / "ssh") as server:
        subprocess.run(["sshfs", "-F", str(server.config), f"n1:{there}", str(here)], check=True)
        try:
            yield there, here
        finally:
            with contextlib.suppress(FileNotFoundError):
                subprocess.run(["fusermount3", "-u", str(here)], check=True)


def shoal(*words, cwd):
    command = [sys.executable, "-m", "shoal", *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def refused(done):
    """Whether a verb told what is wrong and what to do, and nothing of its own inside."""
    told = done.stdout + done.stderr
    parts = ("SH643", "fuse.sshfs", "--runs DIR")
    return done.returncode != 0 and all(part in told for part in parts) and "Traceback" not in told


def test_no_queue_is_made_on_a_mounted_network_file_system(shared, job, tmp_path):
    there, here = shared
    assert file_system_of(here, Path("/proc/self/mountinfo").read_text()) == "fuse.sshfs"
    save_job(job(), tmp_path / "job.yaml")
    for words in (("submit", "job.yaml"), ("up",)):
        done = shoal(*words, "--runs", here / "runs", cwd=tmp_path)
        assert refused(done), (words, done)
        assert not (there / "runs").exists(), words


def test_a_queue_of_the_server_is_not_opened_over_the_network(shared, job):
    there, here = shared
    paths = QueuePaths.of(there / "runs")
    with QueueStore(paths) as store:
        store.submit([job()], user="ann")
    before = paths.file.read_bytes()
    for words in (("queue",), ("cancel", "1"), ("top", "--once")):
        done = shoal(*words, "--runs", here / "runs", cwd=there)
        assert refused(done), (words, done)
    assert paths.file.read_bytes() == before
