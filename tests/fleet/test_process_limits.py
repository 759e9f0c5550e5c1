import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from shoal.fleet.process_limits import CgroupParent, enter_cgroup, find_cgroup_parent, pick_cores, plan_limits
from shoal.spec.engine import LimitsConfig

BOTH = LimitsConfig(memory="1.5 GB", cpus=0.5)


def groups(root: Path, *, enabled: str) -> Path:
    """A directory as cgroup v2 would show it to a process in the group /slice/scope."""
    scope = root / "slice" / "scope"
    scope.mkdir(parents=True)
    for directory, controllers in ((root, "cpu memory"), (root / "slice", enabled), (scope, "")):
        (directory / "cgroup.controllers").write_text(controllers)
        (directory / "cgroup.subtree_control").write_text(controllers)
        (directory / "cgroup.procs").write_text("")
    return root


def test_with_cgroups_the_kernel_counts_what_is_used():
    plan = plan_limits(BOTH, CgroupParent(Path("/x"), frozenset({"cpu", "memory"})), cores=range(4), seat=0)
    assert plan.cgroup_files == {
        "memory.max": "1500000000",
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "cpu.max": "50000 100000",
    }
    assert (plan.data_bytes, plan.cores) == (None, ())
    assert len(plan.notes) == 2
    assert all("by cgroup v2" in note for note in plan.notes)


def test_without_cgroups_other_means_are_used_and_told():
    plan = plan_limits(BOTH, CgroupParent(why="there are none"), cores=range(4), seat=5)
    assert (plan.cgroup_files, plan.data_bytes, plan.cores) == ({}, 1_500_000_000, (1,))
    assert len(plan.notes) == 2
    assert all("there are none" in note for note in plan.notes)


def test_a_limit_that_cannot_bind_is_told():
    plan = plan_limits(LimitsConfig(cpus=8), CgroupParent(why="none"), cores=range(4), seat=0)
    assert not plan.cores
    assert "no effect" in plan.notes[0]


def test_neighbouring_seats_get_other_cores():
    assert [pick_cores(range(4), 2, seat=seat) for seat in range(3)] == [(0, 1), (2, 3), (0, 1)]


def test_the_group_above_is_used_where_its_own_has_no_controllers(tmp_path):
    root = groups(tmp_path, enabled="cpu memory")
    found = find_cgroup_parent(root, "0::/slice/scope\n", need={"memory"})
    assert found.directory == root / "slice"


def test_a_machine_without_the_controllers_says_so(tmp_path):
    root = groups(tmp_path, enabled="pids")
    assert find_cgroup_parent(root, "0::/slice/scope\n", need={"memory"}).why
    assert "no cgroup v2" in find_cgroup_parent(tmp_path / "elsewhere", "4:memory:/x\n0::/\n", need={"memory"}).why


def test_what_is_missing_of_the_controllers_is_named_and_the_rest_is_used(tmp_path):
    root = groups(tmp_path, enabled="memory")
    found = find_cgroup_parent(root, "0::/slice/scope\n", need={"memory", "cpu"})
    assert (found.directory, found.controllers) == (root / "slice", {"memory"})
    plan = plan_limits(BOTH, found, cores=range(4), seat=0)
    assert (plan.cgroup_files["memory.max"], plan.data_bytes, plan.cores) == ("1500000000", None, (0,))
    assert [note.partition(": ")[2] for note in plan.notes] == ["", "this user has no control of cpu in cgroup v2"]


def test_entering_a_group_writes_its_settings_and_removes_those_of_dead_processes(tmp_path):
    dead = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True).stdout.strip()
    (tmp_path / f"shoal-old-0-{dead}").mkdir()
    (tmp_path / f"shoal-other-0-{os.getppid()}").mkdir()
    group = tmp_path / f"shoal-run-0-{os.getpid()}"
    enter_cgroup(group, {"cpu.max": "50000 100000", "memory.swap.max": "0"})
    assert (group / "cpu.max").read_text() == "50000 100000"
    assert not (group / "memory.swap.max").exists(), "the kernel does not have it"
    assert (group / "cgroup.procs").read_text() == str(os.getpid())
    assert sorted(tmp_path.iterdir()) == sorted([group, tmp_path / f"shoal-other-0-{os.getppid()}"])


def test_a_process_cannot_reserve_more_than_its_limit(tmp_path):
    """With a real limit of the operating system, in a process of its own."""
    code = (
        "import sys; from pathlib import Path; from shoal.fleet.process_limits import apply_limits;"
        "from shoal.spec.engine import LimitsConfig;"
        "print(apply_limits(LimitsConfig(memory='400 MB', cpus=1), seat=0, run='r', root=Path(sys.argv[1])));"
        "import os; print(len(os.sched_getaffinity(0)));"
        "bytearray(900_000_000)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "MemoryError" in done.stderr
    assert "reserves" in done.stdout
    if len(os.sched_getaffinity(0)) > 1:
        assert done.stdout.splitlines()[-1] == "1"
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY


@pytest.mark.parametrize("memory", ["0 GB", "much", "2", "-1 GB", "2 GiB"])
def test_a_bad_size_is_refused(memory):
    with pytest.raises(ValidationError):
        LimitsConfig(memory=memory)
