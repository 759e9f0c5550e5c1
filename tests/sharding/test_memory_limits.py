"""What memory there is, for whom; and that it goes back."""

import os
import platform
import subprocess
import sys

import psutil
import pytest

from shoal.sharding import memory_limits
from shoal.sharding.memory_limits import OWN_LIMIT, fits_in_memory, memory_headroom

HERE, THERE = "here", "there"


@pytest.mark.parametrize(
    ("needs", "found", "hosts", "enough"),
    [
        ([3, 3], [{"machine": 6}, {"machine": 7}], [HERE, HERE], True),
        ([3, 3], [{"machine": 6}, {"machine": 5}], [HERE, HERE], False),
        ([3, 3], [{"machine": 3}, {"machine": 3}], [HERE, THERE], True),
        ([3, 2], [{"machine": 9}, {"machine": 1}], [HERE, THERE], False),
        ([3, 3], [{"machine": 9, OWN_LIMIT: 3}, {"machine": 9, OWN_LIMIT: 3}], [HERE, HERE], True),
        ([3, 3], [{"machine": 9, OWN_LIMIT: 3}, {"machine": 9, OWN_LIMIT: 2}], [HERE, HERE], False),
        ([3, 3], [{"machine": 9, "/a": 3}, {"machine": 9, "/b": 3}], [HERE, HERE], True),
        ([3, 3], [{"machine": 9, "/a": 5}, {"machine": 9, "/a": 5}], [HERE, HERE], False),
        ([3, 0], [{"machine": 3}, {"machine": 3}], [HERE, HERE], True),
    ],
)
def test_what_is_shared_is_counted_once_and_what_is_not_for_each(needs, found, hosts, enough):
    assert fits_in_memory(dict(enumerate(needs)), dict(enumerate(found)), dict(enumerate(hosts))) == enough


def test_what_there_is():
    found = memory_headroom()
    assert found["machine"] > 0
    assert all(isinstance(room, int) for room in found.values())


PROGRAM = """
import ctypes, os
from array import array
from shoal.sharding.memory_limits import release_freed_memory
from shoal.lanes.torch_setup import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
file, held = os.open("/proc/self/statm", os.O_RDONLY), array("Q", [0] * 512)
def resident():
    return int(os.pread(file, 100, 0).split()[1]) * 4096
keep_freed_memory()
release_freed_memory()
before = resident()
for i in range(512):
    held[i] = libc.malloc(1 << 19)
    ctypes.memset(held[i], 1, 1 << 19)
between = resident()
for i in reversed(range(512)):
    libc.free(held[i])
print(between - before, resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is another one")
def test_a_worker_with_a_part_of_a_model_gives_back_what_it_has_no_use_for():
    """Whatever it has asked malloc for before: a worker keeps the memory of a step for the next."""
    plain = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=plain, capture_output=True, text=True, check=True)
    taken, left = map(int, done.stdout.split())
    assert taken > 200 << 20
    assert left < taken / 4


def test_the_memory_of_the_machine_is_the_most_that_may_be_used():
    assert 0 < memory_limits.memory_limit_bytes() <= psutil.virtual_memory().total
