"""What may be wrong with one host of a run over ssh: its clock, its disk, and what others send to its ports. Run by
`make test-ssh`."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import MLP
from tests.fleet.ssh_server import SSHD, ssh_server
from tests.jobs.background_run import background_run
from tests.jobs.fault_injection import assert_same, events_of_kind, reference_receipt
from tests.jobs.port_scanner import PortScanner

pytestmark = [pytest.mark.ssh, pytest.mark.skipif(SSHD is None, reason="no sshd: tools/install_sshd.sh")]
SMALL = MLP | {"steps": 400, "evaluate": {"every_steps": 100}, "checkpoint": {"every": "50 steps"}}
LONGER = SMALL | {"steps": 3000}  # ten minutes while steps are slow
FAKETIME = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
CAN_MOUNT = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0


@pytest.fixture
def server(tmp_path_factory):
    with ssh_server(tmp_path_factory.mktemp("ssh")) as made:
        yield made


def engine_with(server, script, root):
    """Two hosts. The interpreter of n2 is started by these lines of sh, in which "$@" is its command."""
    own = root / "python-of-n2"
    own.write_text(f'#!/bin/sh\nset -- {sys.executable} "$@"\n{script}\n')
    own.chmod(0o755)
    hosts = [{"host": "n1"}, {"host": "n2", "python": str(own)}]
    return {"kind": "ssh", "hosts": hosts, "python": sys.executable, "config": str(server.config)}


def slow(job_dir):
    return [{"name": "delays.py:SlowSteps", "args": {"seconds": 0.2, "until": str(job_dir / "ready")}}]


@pytest.mark.skipif(not FAKETIME, reason="no libfaketime: tools/install_sshd.sh")
@pytest.mark.parametrize("shift", ["+400d", "-400d"])
def test_a_clock_that_is_wrong_by_a_year_changes_nothing(run, server, job_dir, tmp_path, shift):
    """Neither bits nor deadlines: nobody counts as silent, and every event has the driver's time."""
    script = f'exec env FAKETIME={shift} LD_PRELOAD={FAKETIME[0]} "$@"' if FAKETIME else ""
    engine = engine_with(server, script, tmp_path)
    began = time.time()
    with background_run(run, LONGER, workers=2, engine=engine, watchers=slow(job_dir)) as it:
        it.wait_for_workers(2)
        seen = [psutil.Process(worker.pid).environ().get("FAKETIME") for worker in it.state.training_workers]
        it.wait_until(lambda state: state.step >= 10)
        (job_dir / "ready").touch()
    outcome = it.outcome.result()
    assert sorted(seen, key=str) == sorted([None, shift], key=str), "one worker has another clock"
    assert_same(outcome, reference_receipt(run, LONGER))
    assert outcome.receipt.deaths_survived == 0
    assert not events_of_kind(outcome, "evicted")
    assert all(began <= event.t <= time.time() for event in it.events)


OTHER_BITS = {
    "processor": ("env ATEN_CPU_CAPABILITY=default", r"differ: processor \S+ and \S+"),
    "package": ("env PYTHONPATH={other}:$PYTHONPATH", r"differ: numpy \S+ and \S+"),
}


@pytest.mark.parametrize("what", OTHER_BITS)
def test_hosts_that_would_compute_other_bits_are_told_before_the_first_step(run, server, job_dir, tmp_path, what):
    """On n2, torch uses older instructions, or another numpy seems to be installed."""
    other = tmp_path / "other" / "numpy-1.0.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.0.0\n")
    environment, told = OTHER_BITS[what]
    script = f'exec {environment.format(other=other.parent)} "$@"'
    outcome = run(SMALL, workers=2, engine=engine_with(server, script, tmp_path))
    assert outcome.status == "failed"
    assert outcome.error.code == "SH654"
    assert re.search(told, outcome.error.message)
    assert not events_of_kind(outcome, "worker_started")


HIDES = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == "sndhdr":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
"""


def test_a_package_that_only_the_users_model_needs_and_one_host_lacks_is_told_with_the_host(
    run, server, job_dir, tmp_path
):
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(HIDES)
    models = (job_dir / "models.py").read_text()
    (job_dir / "needy.py").write_text(f"import sndhdr\n{models}")
    model = MLP["model"] | {"name": MLP["model"]["name"].replace("models.py", "needy.py")}
    script = f'exec env PYTHONPATH={hidden}:$PYTHONPATH "$@"'
    outcome = run(SMALL, model=model, workers=2, engine=engine_with(server, script, tmp_path))
    assert outcome.status == "failed"
    assert "No module named 'sndhdr'" in str(outcome.error)
    assert "n2" in str(outcome.error), str(outcome.error)
    assert not events_of_kind(outcome, "step")


def test_garbage_on_every_port_changes_nothing(run, server, job_dir, tmp_path):
    """Until each port was called: of the driver, of two workers and of two servers."""
    scanner = PortScanner()
    job = LONGER | {"sync": {"kind": "server", "servers": 2, "backups": 1}}
    engine = engine_with(server, 'exec "$@"', tmp_path)

    def look(paths, event, state):
        scanner.on_event(paths, event, state)
        if len(scanner.called_ports) >= 5 and scanner.attempts > 50:
            (job_dir / "ready").touch()

    outcome = run(job, look=look, workers=2, engine=engine, watchers=slow(job_dir))
    scanner.stop()
    assert_same(outcome, reference_receipt(run, job))
    assert (outcome.receipt.deaths_survived, outcome.receipt.server_deaths_survived) == (0, 0)
    assert (job_dir / "ready").exists()
    assert not scanner.accepted_ports


SMALL_DISK = """
export TMPDIR={disk} XDG_CACHE_HOME={disk}
exec unshare -m sh -c 'mount -t tmpfs -o size=2m tmpfs {disk} && {before} exec "$@"' sh "$@"
"""


def small_disk(disk, *, before=""):
    disk.mkdir()
    return SMALL_DISK.strip().format(disk=disk, before=before)


def fill(path):
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1 << 16, 1 << 12):
            with contextlib.suppress(OSError):
                while file.write(b"x" * size) == size:
                    pass


@pytest.mark.skipif(not CAN_MOUNT, reason="mounts a small disk")
def test_a_disk_that_is_full_from_the_start_is_told(run, server, job_dir, tmp_path):
    disk = tmp_path / "disk"
    script = small_disk(disk, before=f"dd if=/dev/zero of={disk}/filler bs=4096 2>/dev/null;")
    outcome = run(SMALL, workers=2, engine=engine_with(server, script, tmp_path))
    assert outcome.status == "failed"
    assert outcome.error.code == "SH510"
    assert outcome.error.where.startswith(str(disk))
    assert f"cannot be kept on {socket.gethostname()}: No space left on device" in outcome.error.message


@pytest.mark.skipif(not CAN_MOUNT, reason="mounts a small disk")
def test_a_disk_that_fills_while_it_trains_loses_nothing(run, server, job_dir, tmp_path):
    """The worker trains on. When it is killed, no other can start there."""
    disk = tmp_path / "disk"
    engine = engine_with(server, small_disk(disk), tmp_path)
    with background_run(run, LONGER, workers=2, engine=engine, watchers=slow(job_dir)) as it:
        it.wait_for_workers(2)
        there = next(w for w in it.state.training_workers if os.path.ismount(f"/proc/{w.pid}/root{disk}"))
        fill(Path(f"/proc/{there.pid}/root{disk}/filler"))
        step = it.state.step
        it.wait_until(lambda state: state.step >= step + 10)
        assert psutil.pid_exists(there.pid)
        psutil.Process(there.pid).kill()
        it.wait_until(lambda state: any(w.state == "dead" for w in state.workers.values()))
        step = it.state.step
        it.wait_until(lambda state: state.step >= step + 10)
        (job_dir / "ready").touch()
    assert_same(it.outcome.result(), reference_receipt(run, LONGER))
