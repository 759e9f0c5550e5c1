"""What verbs print on. Imports are inside the functions: `shoal --help` loads none of it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from rich.console import Console

    from shoal.jobs.run_result import RunResult


def console(to_stderr: bool = False) -> Console:
    from shoal.terminal.console import make_console

    return make_console(to_stderr=to_stderr)


def print_lines(*lines: str) -> None:
    from shoal.terminal import reports

    reports.print_lines(console(), *lines)


def print_plain(*lines: str) -> None:
    """Without rich, which takes time to load and memory to keep: for a server."""
    sys.stdout.buffer.write(b"".join(os.fsencode(line) + b"\n" for line in lines))
    sys.stdout.flush()


def print_json(value: Any) -> None:
    from shoal.terminal.console import json_line

    print(json_line(value))


def print_and_exit(result: RunResult, *, as_json: bool) -> NoReturn:
    """Print the result, and exit with its exit code."""
    from shoal.terminal import exit_status

    sys.exit(exit_status.print_result(result, console(), console(True), as_json=as_json))


def end_at_once() -> NoReturn:
    """End the process without waiting for its threads and without taking its modules apart, which takes longer than
    everything else at the end."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)
