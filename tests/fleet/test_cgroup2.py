"""Limits of workers by a kernel with cgroup v2: real processes, real groups. `make test-limits` brings such a kernel,
where the whole tree belongs to the tests."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from shoal.fleet.usage import memory_of, oom_kills

pytestmark = pytest.mark.limits

ROOT = Path("/sys/fs/cgroup")
NOBODY = 65534
PATIENCE_S = 300
CPU_PERIOD_US, QUARTER_US = 100_000, 25_000
BY_KERNEL = "limits.memory bounds what the worker uses to 100 MB, by cgroup v2"
BY_RESERVATION = "limits.memory bounds what the worker reserves, not what it uses: "

# as a worker begins, and then what a test wants of it
BEGIN = f"""
import json, os, subprocess, sys, time
from pathlib import Path
from shoal.fleet.process_limits import apply_limits
from shoal.fleet.usage import memory_of, own_cgroups, room_bytes
from shoal.spec.engine import LimitsConfig
if sys.argv[2] == "nobody":
    os.setgroups([])
    os.setgid({NOBODY})
    os.setuid({NOBODY})
notes = apply_limits(LimitsConfig.model_validate_json(sys.argv[1]), seat=0, run="run")
group = Path("/sys/fs/cgroup" + Path("/proc/self/cgroup").read_text().strip()[3:])
print(json.dumps({{"notes": notes, "group": str(group)}}), flush=True)
sys.stdin.readline()
"""


class LimitedWorker:
    """A process in the group `scope` that sets limits for itself, says which, and goes on when it is told."""

    def __init__(self, scope, then="", *, user="root", before=(), **limits):
        enter = ["sh", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"', str(scope), *before]
        command = [*enter, sys.executable, "-c", BEGIN + then, json.dumps(limits), user]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        first = self.process.stdout.readline()
        told = json.loads(first) if first else pytest.fail(self.process.stderr.read())
        self.notes, self.group = told["notes"], Path(told["group"])

    def go_on(self):
        """To its end. Returns its exit code."""
        self.out, self.err = self.process.communicate("\n", timeout=PATIENCE_S)
        return self.process.returncode


def wait_until_gone(group):
    until = time.monotonic() + PATIENCE_S
    while group.exists():
        assert time.monotonic() < until, (group / "cgroup.procs").read_text()
        time.sleep(0.01)


@pytest.fixture
def session():
    """A group with controllers and without processes, and in it `scope`, as the processes of a login have it."""
    assert (ROOT / "cgroup.controllers").is_file(), "`make test-limits` brings a kernel with cgroup v2"
    (ROOT / "cgroup.subtree_control").write_text("+memory +cpu")
    made = ROOT / f"session-{os.getpid()}"
    (made / "scope").mkdir(parents=True)
    yield made
    (made / "cgroup.kill").write_text("1")
    until = time.monotonic() + PATIENCE_S
    while "populated 1" in (made / "cgroup.events").read_text():
        assert time.monotonic() < until
        time.sleep(0.01)
    left = [group.name for group in made.iterdir() if group.is_dir() and group.name != "scope"]
    for name in (*left, "scope"):
        (made / name).rmdir()
    made.rmdir()


def give_to_nobody(session, *names):
    for path in (session, *(session / name for name in names)):
        os.chown(path, NOBODY, NOBODY)


def test_a_worker_above_its_memory_is_killed_by_the_kernel(session):
    kills = oom_kills()
    worker = LimitedWorker(session / "scope", "held = b'x' * 300_000_000", memory="100 MB")
    assert worker.notes == [BY_KERNEL]
    assert worker.group.parent == session
    assert (worker.group / "memory.max").read_text().strip() == str(100_000_000 // 4096 * 4096)
    assert worker.go_on() == -signal.SIGKILL
    assert oom_kills() > kills
    wait_until_gone(worker.group)


def test_what_a_worker_starts_is_in_its_limit_and_dies_with_it(session):
    """The kernel alone would kill only the largest process, and the worker would wait for its data for ever."""
    then = "subprocess.run([sys.executable, '-c', 'held = bytes([1]) * 300_000_000'])"
    worker = LimitedWorker(session / "scope", then, memory="100 MB")
    assert worker.go_on() == -signal.SIGKILL, worker.err
    wait_until_gone(worker.group)


def test_room_is_what_the_limit_leaves(session):
    then = "before = room_bytes(own_cgroups()); held = b'x' * 50_000_000; print(before, room_bytes(own_cgroups()))"
    worker = LimitedWorker(session / "scope", then, memory="100 MB")
    assert worker.go_on() == 0, worker.err
    before, after = map(int, worker.out.split())
    assert before < 100_000_000
    assert 40_000_000 < before - after < 60_000_000


def test_cached_files_do_not_count_as_used(session):
    """They fill any limit, and the kernel takes them back when it is reached."""
    large = str(Path(find_spec("torch").origin).parent / "lib" / "libtorch_cpu.so")
    then = f"""
import hashlib
with open({large!r}, "rb") as file:
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    while file.read(1 << 20): pass
print(memory_of(group)[1], int((group / "memory.current").read_text()))
"""
    worker = LimitedWorker(session / "scope", then, memory="100 MB")
    assert worker.go_on() == 0, worker.err
    used, charged = map(int, worker.out.split())
    assert charged > 60_000_000, "the file fills the group"
    assert used < 30_000_000


def test_cores_are_bounded_over_all_processes_of_a_worker(session):
    """Two processes that compute all the time get a quarter of a core together."""
    then = """
import signal
child = os.fork()
begin = time.process_time()
while child == 0 or time.process_time() - begin < 0.5: pass
os.kill(child, signal.SIGKILL)
print((group / "cpu.stat").read_text())
"""
    worker = LimitedWorker(session / "scope", then, cpus=0.25)
    assert worker.notes == ["limits.cpus bounds the worker to 0.25 cores, by cgroup v2"]
    assert (worker.group / "cpu.max").read_text().split() == [str(QUARTER_US), str(CPU_PERIOD_US)]
    assert worker.go_on() == 0, worker.err
    stat = {name: int(value) for name, value in map(str.split, worker.out.strip().splitlines())}
    assert stat["usage_usec"] > 500_000
    assert stat["nr_throttled"] > 10
    assert stat["usage_usec"] < (stat["nr_periods"] + 4) * QUARTER_US, "the quota of the periods that have begun"


def test_a_user_who_may_not_make_groups_gets_the_next_best_and_is_told(session):
    worker = LimitedWorker(session / "scope", "held = b'x' * 300_000_000", user="nobody", memory="200 MB", cpus=1)
    why = "this user may not make groups in cgroup v2"
    assert worker.notes == [BY_RESERVATION + why, f"limits.cpus is enforced as whole cores (1): {why}"]
    assert worker.group == session / "scope"
    assert worker.go_on() == 1
    assert "MemoryError" in worker.err


def test_a_user_with_a_group_without_controllers_gets_the_next_best_and_is_told(session):
    give_to_nobody(session, "cgroup.procs")
    worker = LimitedWorker(session / "scope", "held = b'x' * 300_000_000", user="nobody", memory="200 MB")
    assert worker.notes == [BY_RESERVATION + "this user may not make groups in cgroup v2"]
    assert worker.go_on() == 1
    assert "MemoryError" in worker.err


def test_a_user_with_a_part_of_the_controllers_gets_the_next_best_for_the_others(session):
    (session / "cgroup.subtree_control").write_text("+cpu")
    give_to_nobody(session, "cgroup.procs")
    worker = LimitedWorker(session / "scope", user="nobody", memory="400 MB", cpus=0.5)
    assert worker.notes == [
        BY_RESERVATION + "this user has no control of memory in cgroup v2",
        "limits.cpus bounds the worker to 0.5 cores, by cgroup v2",
    ]
    assert worker.go_on() == 0, worker.err
    wait_until_gone(worker.group)


def test_a_user_to_whom_a_group_was_delegated_has_the_kernel_hold_the_limits(session):
    """The controllers are there, and nobody has switched them on yet."""
    give_to_nobody(session, "cgroup.procs", "cgroup.subtree_control")
    assert not (session / "cgroup.subtree_control").read_text().strip()
    worker = LimitedWorker(session / "scope", "held = b'x' * 300_000_000", user="nobody", memory="100 MB")
    assert worker.notes == [BY_KERNEL]
    assert worker.go_on() == -signal.SIGKILL
    wait_until_gone(worker.group)


def test_in_a_container_its_own_limit_counts_and_groups_cannot_be_made(session):
    """Its processes are in the outermost group that it sees, so by the rules of the kernel that has no others."""
    (session / "cgroup.subtree_control").write_text("+memory +cpu")
    (session / "scope" / "memory.max").write_text("200M")
    enter = 'umount /sys/fs/cgroup && mount -t cgroup2 c /sys/fs/cgroup && exec "$@"'
    inside = ["unshare", "--cgroup", "--mount", "sh", "-c", enter, "sh"]
    then = "print(*own_cgroups(), memory_of(group)[0], room_bytes(own_cgroups()))"
    worker = LimitedWorker(session / "scope", then, before=inside, cpus=0.5)
    assert "this user may not make groups in cgroup v2" in worker.notes[0]
    assert worker.group == ROOT, "as it sees it"
    assert worker.go_on() == 0, worker.err
    group, limit, room = worker.out.split()
    assert (group, int(limit)) == (str(ROOT), 200 << 20)
    assert int(room) < 200 << 20


def test_a_setting_that_the_kernel_does_not_have_is_left_out(session):
    (session / "cgroup.subtree_control").write_text("+cpu")
    then = """
from shoal.fleet.process_limits import enter_cgroup
made = group.parent / f"shoal-x-0-{os.getpid()}"
enter_cgroup(made, {"cpu.max": "50000 100000", "memory.swap.max": "0"})
print((made / "cpu.max").read_text())
"""
    worker = LimitedWorker(session / "scope", then)
    assert worker.go_on() == 0, worker.err
    assert worker.out.split() == ["50000", "100000"]


def test_a_group_stays_as_long_as_a_process_of_the_worker_lives(session):
    then = "print(subprocess.Popen(['sleep', '1000'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)"
    worker = LimitedWorker(session / "scope", then, memory="100 MB")
    assert worker.go_on() == 0, worker.err
    assert memory_of(worker.group)[0] < 100_000_001
    os.kill(int(worker.out), signal.SIGKILL)
    wait_until_gone(worker.group)


def test_nothing_is_left_of_a_worker_that_is_killed(session):
    worker = LimitedWorker(session / "scope", memory="100 MB", cpus=1)
    worker.process.kill()
    worker.process.communicate()
    wait_until_gone(worker.group)


def test_a_worker_removes_what_was_left_because_everything_was_killed(session):
    old = LimitedWorker(session / "scope", memory="100 MB")
    (session / "scope" / "cgroup.kill").write_text("1")  # the process that would remove the group is there
    old.process.kill()
    old.process.communicate()
    assert old.group.is_dir()
    new = LimitedWorker(session / "scope", memory="100 MB")
    assert not old.group.exists()
    assert new.go_on() == 0, new.err
    wait_until_gone(new.group)
