"""A Ray cluster on this machine for the benchmarks, which is gone at the end whatever happens."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def ray_cluster(*, cores: int, directory: Path) -> Iterator[None]:
    """Starts a cluster with so many cores. Its processes are those whose environment names the directory, whose path
    must be short, because it holds sockets."""
    try:
        import ray
    except ImportError:
        raise SystemExit("Ray is not installed: pip install 'ray[tune]'.") from None
    os.environ |= {"RAY_AIR_NEW_OUTPUT": "0", "RAY_CHDIR_TO_TRIAL_DIR": "0", "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1"}
    os.environ["SHOAL_BENCHMARK_RAY"] = str(directory)
    try:
        ray.init(
            address="local",
            num_cpus=cores,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(directory),
            object_store_memory=200 << 20,
        )
        yield
    finally:
        with contextlib.suppress(Exception):
            ray.shutdown()
        for pid in processes_with("SHOAL_BENCHMARK_RAY", str(directory)):
            if pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def processes_with(name: str, value: str) -> list[int]:
    """Processes whose environment has this value."""
    wanted, found = f"{name}={value}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in entry.joinpath("environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found
