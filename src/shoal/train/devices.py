"""Chooses the device to train on. All workers of one machine spread over its GPUs, whichever driver started them."""

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
    """Resolve the device that a job asks for. SH411 if this machine does not have it."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(wanted)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise error("SH411", f"there is no device '{wanted}' here", where="device")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise error("SH411", "there is no device 'mps' here", where="device")
    return device


def claim_device(wanted: str) -> torch.device:
    """Like `pick_device`, for a worker. If the job does not name a GPU, the worker claims the one with the fewest
    workers for as long as its process lives."""
    device = pick_device(wanted)
    if device.type != "cuda":
        return device
    if device.index is None:
        device = torch.device("cuda", claim_slot(cache_directory() / "gpus" / host_id(), torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def claim_slot(directory: Path, slots: int) -> int:
    """Lock one of `slots` slots. Every slot is taken once before any is taken twice. The process never releases its
    lock: the operating system does that when the process ends, however it ends."""
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


def device_memory() -> tuple[int, int] | None:
    """Used and total bytes of the current GPU; None before this process uses one."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    free, total = torch.cuda.mem_get_info()
    return total - free, total
