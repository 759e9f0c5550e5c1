"""Processes of a side that is written here: forked, each with a pipe to the one that started them."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.links.hosts import switched

_FORK = multiprocessing.get_context("fork")
_OPTIMIZERS_NEED = "torch._dynamo"  # torch imports it when the first optimizer is made: better once than everywhere


def prepare() -> None:
    """Before processes are started that use torch."""
    importlib.import_module(_OPTIMIZERS_NEED)


def start(act: Callable[..., None], *args: Any) -> Connection:
    """`act(pipe, *args)` in a process of its own, which goes with this one. If it fails, so does the side."""
    ours, theirs = _FORK.Pipe()
    _FORK.Process(target=_exit_on_error, args=(act, theirs, *args), daemon=True).start()
    theirs.close()
    return ours


def _exit_on_error(act: Callable[..., None], pipe: Connection, *args: Any) -> None:
    try:
        act(pipe, *args)
    except Exception:
        traceback.print_exc()
        os.kill(os.getppid(), signal.SIGINT)


EnterHost = Callable[[], str]
"""Puts the process that calls it where it belongs, and returns its address there."""


@contextlib.contextmanager
def hosts_for(count: int, mbit: float) -> Iterator[list[EnterHost]]:
    """For so many processes: all on this host, or each on one of its own behind a wire of that speed."""
    if mbit:
        with switched(count, mbit) as hosts:
            yield hosts
    else:
        yield [lambda: "127.0.0.1"] * count


def lockstep_rounds(workers: list[Connection]) -> Callable[[int], list[float]]:
    """Tells all workers how many rounds to make; a round takes as long as for the slowest of them."""

    def make_rounds(rounds: int) -> list[float]:
        for worker in workers:
            worker.send(rounds)
        return [max(times) for times in zip(*(worker.recv() for worker in workers), strict=True)]

    return make_rounds
