"""On which device to train. Workers of one machine spread over its GPUs, whoever started them."""

from __future__ import annotations

import fcntl
import itertools
import os
from pathlib import Path

import torch

from shoal.errors import error
from shoal.net.host_id import host_id
from shoal.spec.run_paths import cache_directory


def pick_device(wanted: str) -> torch.device:
    """The device of a job, for one process of it."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(wanted)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise error("SH411", f"there is no device '{wanted}' here", where="device")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise error("SH411", "there is no device 'mps' here", where="device")
    return device


def claim_device(wanted: str) -> torch.device:
    """The same for a worker: where the job does not say which GPU, the one that fewest others have, as long as this
    process lives."""
    device = pick_device(wanted)
    if device.type != "cuda":
        return device
    if device.index is None:
        device = torch.device("cuda", claim_slot(cache_directory() / "gpus" / host_id(), torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def claim_slot(directory: Path, slots: int) -> int:
    """One of so many, each of which is taken once before one is taken twice. The lock is never let go of: the system
    does that when the process ends, however it ends."""
    directory.mkdir(parents=True, exist_ok=True)
    for layer in itertools.count():
        for slot in range(slots):
            lock = os.open(directory / f"{slot}.{layer}", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
            else:
                return slot
    raise AssertionError
