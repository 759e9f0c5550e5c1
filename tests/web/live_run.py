"""A run that trains while a test looks at it: driver and workers are real processes."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from shoal.events import RunState, load_state
from shoal.spec.run_paths import RunPaths
from shoal.web.serve import WebServer

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits"
PATIENCE_S = 180


@contextlib.contextmanager
def serving(runs: Path, *, listen: str = "127.0.0.1:0", tls: Path | None = None) -> Iterator[WebServer]:
    """The server in a thread of this process, on a real port."""
    server = WebServer(runs, listen=listen, tls=tls, say=lambda line: None)
    thread = threading.Thread(target=server.run_in_thread)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(30)


@contextlib.contextmanager
def training(
    directory: Path, runs: Path, *, epochs: int = 2000, workers: str = "1..3", lanes: int = 4, **changes: Any
) -> Iterator[RunPaths]:
    """`shoal run` of the demo in a process of its own; it is ended at the end."""
    shutil.copytree(EXAMPLE, directory)
    job = dict(yaml.safe_load((directory / "job.yaml").read_text())) | {"epochs": epochs, "lanes": lanes, **changes}
    (directory / "job.yaml").write_text(yaml.safe_dump(job))
    words = [sys.executable, "-m", "shoal", "run", "job.yaml", "--runs", str(runs), "--workers", workers, "--quiet"]
    driver = subprocess.Popen(
        words,
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    paths = RunPaths(Path(runs).resolve() / "digits-1")
    try:
        wait_until(lambda: paths.job.is_file() and state_of(paths).step > 20)
        yield paths
    finally:
        if driver.poll() is None:
            driver.send_signal(signal.SIGTERM)
            driver.wait(PATIENCE_S)


def state_of(paths: RunPaths) -> RunState:
    return load_state(paths.events, paths.state_snapshot)


def wait_until(holds: Callable[[], Any]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.1)
