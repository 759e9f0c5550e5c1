"""Memory that is freed in one step is there in the next."""

import os
import platform
import subprocess
import sys

import pytest

STEPS, PIECE = 20, 4 << 20
PROGRAM = f"""
import resource, sys
import torch
from shoal.lanes.torch_setup import keep_freed_memory
if "keep" in sys.argv:
    keep_freed_memory()
def step():
    held = [torch.ones({PIECE} // 4) for _ in range(4)]
    for _ in range(3):
        held.pop()
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({STEPS}):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*arguments, **environment):
    plain = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, env=plain | environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is another one")
def test_pages_are_not_fetched_again_in_every_step():
    pages = STEPS * PIECE / 4096
    assert faults("keep") < pages / 4  # now and then a piece lies elsewhere
    assert faults("keep", MALLOC_TRIM_THRESHOLD_="65536") > pages / 2, "whoever has chosen already is not overruled"
