"""Stopping a search from another process: its trials save and exit, and it can be resumed."""

from __future__ import annotations

import time

from shoal.errors import error
from shoal.jobs import run_dir
from shoal.jobs.search.journal import EndedRow, read_rows, rows_of
from shoal.jobs.search.search_dir import SearchPaths

POLL_S = 0.1


def stop_search(paths: SearchPaths) -> bool:
    """Ask the driver to stop, and wait until it has exited. Returns whether the search has ended before. SH633 if
    nobody drives it."""
    if not run_dir.is_driven(paths.run):
        raise error("SH633", f"nobody drives '{paths.name}'", where=paths.name)
    while run_dir.is_driven(paths.run):
        paths.stop_request.touch()  # again and again: a driver that is just beginning removes what was there before
        time.sleep(POLL_S)
    paths.stop_request.unlink(missing_ok=True)
    return bool(rows_of(read_rows(paths.journal)[0], EndedRow))
