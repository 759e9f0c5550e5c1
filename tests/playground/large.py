"""A model beside which a process has no room for much else."""

import resource
from pathlib import Path

from torch import nn


def large(width, depth, inputs, classes, more_mb):
    """From now on this process may take `more_mb` more than it has."""
    status = Path("/proc/self/status").read_text()
    used = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + (more_mb << 20), resource.RLIM_INFINITY))
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), *blocks, nn.Linear(width, classes))
