"""Forked processes of a side, each with a pipe to its parent."""

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
_OPTIMIZERS_NEED = "torch._dynamo"  # torch imports it with the first optimizer: once here, not in every fork


def prepare() -> None:
    """Call before forking processes that use torch."""
    importlib.import_module(_OPTIMIZERS_NEED)


def start(act: Callable[..., None], *args: Any) -> Connection:
    """Run `act(pipe, *args)` in a process that ends with this one. If it fails, the side fails."""
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
"""Moves the calling process to its host, and returns its address there."""


@contextlib.contextmanager
def hosts_for(count: int, mbit: float) -> Iterator[list[EnterHost]]:
    """Hosts for `count` processes: all on this host, or each on its own host behind a wire of that speed."""
    if mbit:
        with switched(count, mbit) as hosts:
            yield hosts
    else:
        yield [lambda: "127.0.0.1"] * count


def lockstep_rounds(workers: list[Connection]) -> Callable[[int], list[float]]:
    """Tell all workers how many rounds to make. A round takes as long as the slowest worker needs."""

    def make_rounds(rounds: int) -> list[float]:
        for worker in workers:
            worker.send(rounds)
        return [max(times) for times in zip(*(worker.recv() for worker in workers), strict=True)]

    return make_rounds
