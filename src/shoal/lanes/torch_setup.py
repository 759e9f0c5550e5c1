"""How a process sets up torch and malloc before it computes."""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from shoal.spec.job import Job

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # as in malloc.h
_TRIM_BYTES = 1 << 30
_MMAP_BYTES = 32 << 20  # the largest value that glibc accepts
_USER_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed_memory() -> bool:
    """Make malloc keep freed memory for the next step. True if malloc accepts it.

    By default glibc returns free memory at the end of its heap, and large blocks, to the system at once. Gradients and
    activations are allocated and freed in every step, so their pages would be returned, fetched and zeroed again each
    time. Measured with a GPT of 3.2 million parameters: 1,000 to 8,000 page faults per step, and up to a sixth of the
    time. The user's own malloc settings take precedence.
    """
    if sys.platform != "linux" or any(map(os.environ.get, _USER_SETTINGS)):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # not glibc
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES) and mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES))


_NOT_DETERMINISTIC = "does not have a deterministic implementation"
CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"


def tell_missing_kernels(tell: Callable[[str], object]) -> None:
    """Call `tell` once for each operation that torch says has no deterministic kernel here."""
    told: set[str] = set()
    show = warnings.showwarning

    def look(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        operation, found, _ = str(message).partition(f" {_NOT_DETERMINISTIC}")
        if not found:
            show(message, category, *args, **kwargs)
        elif operation not in told:
            told.add(operation)
            tell(f"{operation} has no deterministic kernel on this device")

    warnings.showwarning = look
    warnings.filterwarnings("always", message=f".*{_NOT_DETERMINISTIC}")


def prepare_torch(job: Job) -> None:
    """Make results reproducible: a fixed number of threads, deterministic kernels."""
    keep_freed_memory()
    if torch.cuda.is_available():
        os.environ.setdefault(CUBLAS_VARIABLE, ":4096:8")  # without it cuBLAS adds in any order
    torch.set_num_threads(job.threads)
    if job.threads > 1 or torch.cuda.is_available():
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False
