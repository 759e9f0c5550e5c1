"""The web page beside another command: a process of its own, so that nothing that happens to it reaches the other."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from shoal.errors import error

TIED = "shoal.fleet.agents.tied_command"
END_TIMEOUT_S = 10.0


@contextlib.contextmanager
def page_beside(runs: Path, *, listen: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """Serve the page while this is open. It prints its link itself, and it ends with this process, also if that is
    killed. SH207 if its packages are not installed."""
    for name in ("starlette", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            raise error("SH207", f"the web page needs {name}", fix="pip install 'shoal[web]'")
    runs.mkdir(parents=True, exist_ok=True)
    words = ["web", "--runs", str(runs), *(["--listen", listen] if listen else [])]
    page = subprocess.Popen(
        [sys.executable, "-m", TIED, str(os.getpid()), sys.executable, "-m", "shoal", *words],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the command, which ends the page when its runs are saved
    )
    try:
        yield page
    finally:
        page.terminate()
        try:
            page.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            page.kill()
            page.wait()
