"""Hard limits of a worker: memory, cores and logs. The worker sets the first two for itself before any code of the job
runs; the driver enforces the third.

Where this user may make groups in cgroup v2, the kernel counts what the worker really uses. Elsewhere a resource limit
bounds the memory that it may reserve, and its cores are whole ones. What cannot be enforced is told.

Bytes in the middle of a log that is too long are given back to the disk where they stand (a hole). So no line that
comes meanwhile is lost, a process need not open another file, and positions in the log stay what they were.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.spec.engine import LimitsConfig
from shoal.spec.run_paths import RunPaths

CGROUP_ROOT = Path("/sys/fs/cgroup")
OPTIONAL_FILES = {"memory.swap.max", "memory.oom.group"}
"""A kernel without swap, or before 4.19, does not have them."""
REMOVER = """cd /; read -r _; left=100
until rmdir "$0" || [ ! -d "$0" ] || [ $left = 0 ]; do left=$((left - 1)); sleep 0.1; done"""
PERIOD_US = 100_000
KEEP_SIZE, PUNCH_HOLE = 1, 2
PAGE_BYTES = 4096
DISK_BLOCK_BYTES = 512


@dataclass(frozen=True)
class CgroupParent:
    """A group below which this process may make its own, with these controllers. `directory` is None if there is none;
    then `why` says so."""

    directory: Path | None = None
    controllers: frozenset[str] = frozenset()
    why: str = ""


@dataclass(frozen=True)
class LimitPlan:
    """What to set: files of a cgroup, a resource limit on reserved memory, a set of cores. `notes` say how the limits
    are enforced."""

    cgroup_files: dict[str, str] = field(default_factory=dict)
    data_bytes: int | None = None
    cores: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def plan_limits(limits: LimitsConfig, parent: CgroupParent, *, cores: Sequence[int], seat: int) -> LimitPlan:
    """Decide how the limits are enforced. `cores` are those that this process may use now."""
    files: dict[str, str] = {}
    notes: list[str] = []
    data_bytes: int | None = None
    pinned: tuple[int, ...] = ()
    if limits.memory_bytes is not None:
        if "memory" in parent.controllers:
            files |= {"memory.max": str(limits.memory_bytes), "memory.swap.max": "0", "memory.oom.group": "1"}
            notes.append(f"limits.memory bounds what the worker uses to {limits.memory}, by cgroup v2")
        else:
            data_bytes = limits.memory_bytes
            notes.append(f"limits.memory bounds what the worker reserves, not what it uses: {parent.why}")
    if limits.cpus is not None:
        if "cpu" in parent.controllers:
            files["cpu.max"] = f"{max(int(limits.cpus * PERIOD_US), 1000)} {PERIOD_US}"
            notes.append(f"limits.cpus bounds the worker to {limits.cpus:g} cores, by cgroup v2")
        elif limits.cpus >= len(cores):
            notes.append(f"limits.cpus has no effect: there are {len(cores)} cores")
        else:
            pinned = pick_cores(cores, math.ceil(limits.cpus), seat=seat)
            notes.append(f"limits.cpus is enforced as whole cores ({len(pinned)}): {parent.why}")
    return LimitPlan(files, data_bytes, pinned, tuple(notes))


def pick_cores(cores: Sequence[int], count: int, *, seat: int) -> tuple[int, ...]:
    """So many neighbouring cores, others for the next seat."""
    first = seat * count % len(cores)
    return tuple(sorted({cores[(first + i) % len(cores)] for i in range(count)}))


def apply_limits(limits: LimitsConfig, *, seat: int, run: str, root: Path = CGROUP_ROOT) -> list[str]:
    """Set the limits for this process. Returns what the user should know; nothing if there are no limits."""
    if limits.memory is None and limits.cpus is None:
        return []
    parent = find_cgroup_parent(root, Path("/proc/self/cgroup").read_text(encoding="utf-8"), need=_controllers(limits))
    cores = sorted(os.sched_getaffinity(0))
    plan = plan_limits(limits, parent, cores=cores, seat=seat)
    if plan.cgroup_files and parent.directory is not None:
        group = parent.directory / f"shoal-{run}-{seat}-{os.getpid()}"
        try:
            remove_after_exit(group)
            enter_cgroup(group, plan.cgroup_files)
        except OSError as failure:
            plan = plan_limits(limits, CgroupParent(why=f"cgroup v2 refuses: {failure}"), cores=cores, seat=seat)
    if plan.cores:
        os.sched_setaffinity(0, plan.cores)
    if plan.data_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (plan.data_bytes, plan.data_bytes))
    return list(plan.notes)


def _controllers(limits: LimitsConfig) -> frozenset[str]:
    wanted = {"memory": limits.memory, "cpu": limits.cpus}
    return frozenset(name for name, value in wanted.items() if value is not None)


def find_cgroup_parent(root: Path, own_cgroups: str, *, need: Iterable[str]) -> CgroupParent:
    """The group of this process, or the one above it: where this user may make groups that have most of these
    controllers. `own_cgroups` is the text of /proc/self/cgroup."""
    own = next((line[3:] for line in own_cgroups.splitlines() if line.startswith("0::")), None)
    if own is None or not (root / "cgroup.controllers").is_file():
        return CgroupParent(why="this machine has no cgroup v2 with controllers")
    here = root / own.lstrip("/")
    best = CgroupParent(why="this user may not make groups in cgroup v2")
    for directory in (here, here.parent) if here != root else (here,):
        if all(os.access(path, os.W_OK) for path in (directory, directory / "cgroup.procs")):
            found = _controllers_below(directory, frozenset(need))
            if len(found) > len(best.controllers):
                missing = ", ".join(sorted(frozenset(need) - found))
                best = CgroupParent(directory, found, f"this user has no control of {missing} in cgroup v2")
    return best


def _controllers_below(directory: Path, need: frozenset[str]) -> frozenset[str]:
    """Which of the controllers the groups in `directory` have. What may be switched on is switched on: by the rules of
    the kernel only where no process is, or in the group of all processes."""
    try:
        enabled = _words(directory / "cgroup.subtree_control")
        is_whole_machine = not (directory / "cgroup.type").exists()
        if is_whole_machine or not (directory / "cgroup.procs").read_text(encoding="ascii"):
            for name in sorted(need & _words(directory / "cgroup.controllers") - enabled):
                with contextlib.suppress(OSError):  # this user may not
                    (directory / "cgroup.subtree_control").write_text(f"+{name}", encoding="ascii")
            enabled = _words(directory / "cgroup.subtree_control")
    except OSError:
        return frozenset()
    return need & enabled


def _words(file: Path) -> frozenset[str]:
    return frozenset(file.read_text(encoding="ascii").split())


def enter_cgroup(group: Path, files: dict[str, str]) -> None:
    """Make a group with these settings, and move this process into it. Groups of workers that have left are removed."""
    for old in group.parent.glob("shoal-*"):
        if not Path("/proc", old.name.rpartition("-")[2]).exists():  # it may be about to enter
            with contextlib.suppress(OSError):  # in use
                old.rmdir()
    group.mkdir()
    try:
        for file, value in files.items():
            if file not in OPTIONAL_FILES or (group / file).exists():
                (group / file).write_text(value, encoding="ascii")
        (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    except OSError:
        with contextlib.suppress(OSError):
            group.rmdir()
        raise


def remove_after_exit(group: Path) -> None:
    """Start a small process that removes the group when this one has ended, however it ends. It waits for the end of a
    pipe that this process and its forks hold. Called before this process enters: it must not be in the group itself."""
    end, _held_until_exit = os.pipe()
    files = [
        (os.POSIX_SPAWN_DUP2, end, 0),
        (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    with contextlib.suppress(OSError):  # then the next worker removes it
        os.posix_spawn("/bin/sh", ["sh", "-c", REMOVER, str(group)], os.environ, file_actions=files, setsid=True)
    os.close(end)


# ---- logs ----


class LogLimit:
    """Belongs to the driver's thread. A log may occupy `limit_bytes`. Of a longer one, a quarter of that at its
    beginning is kept, and half of it at its end."""

    def __init__(self, paths: RunPaths, limit_bytes: int) -> None:
        self._paths, self._limit_bytes = paths, limit_bytes
        self._told: set[str] = set()
        self._works = True

    def enforce(self) -> list[str]:
        """Returns what the run should say: once for each log, and once if the file system cannot do it."""
        notes: list[str] = []
        for path in self._long_logs() if self._works else ():
            try:
                punch(path, start=self._limit_bytes // 4, keep_end=self._limit_bytes // 2)
            except OSError as failure:
                self._works = False
                return [*notes, f"logs are not bounded by limits.log: {failure.strerror}"]
            if path.name not in self._told:
                self._told.add(path.name)
                notes.append(f"{path.name} exceeds limits.log: its beginning and its end are kept")
        return notes

    def _long_logs(self) -> Iterator[Path]:
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._paths.logs):
                is_log = entry.name.endswith((".log", ".err")) and entry.is_file(follow_symlinks=False)
                if is_log and entry.stat().st_blocks * DISK_BLOCK_BYTES > self._limit_bytes:
                    yield Path(entry.path)


def punch(path: Path, *, start: int, keep_end: int) -> None:
    """Give back the whole pages from `start` to `keep_end` before the end. OSError if the file system cannot."""
    first = -(-start // PAGE_BYTES) * PAGE_BYTES
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        length = (os.fstat(descriptor).st_size - keep_end) // PAGE_BYTES * PAGE_BYTES - first
        call = ctypes.CDLL(None, use_errno=True).fallocate
        sizes = ctypes.c_int64(first), ctypes.c_int64(length)
        if length > 0 and call(descriptor, KEEP_SIZE | PUNCH_HOLE, *sizes) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
    finally:
        os.close(descriptor)
