"""What stands for the outside world in Shoal's modules while histories run: clock, disk, sockets, engine.

`installed()` replaces a few names in the modules of Shoal, and restores them. Everything else is the real code.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import shoal.server.supervisor  # noqa: F401  # so that its clock is replaced too
from shoal.checkpoint import store
from shoal.checkpoint.model_check import VerifiedModel
from shoal.fleet import control_client
from shoal.fleet.agents import agent
from shoal.fleet.engines import local
from shoal.jobs import commands, join, run_driver, server_group, worker_group
from shoal.strategies import replicated
from shoal.train import build, elastic, worker
from tests.simulation.agents import SimulatedAgent, SimulatedPath, SimulatedPaths, Tail
from tests.simulation.machine import FiberExecutor, SimulatedFiles, SimulatedReader, SimulatedStream
from tests.simulation.network import SimulatedControlClient
from tests.simulation.world import Process, VirtualTime

if TYPE_CHECKING:
    from tests.simulation.run import SimulatedRun

TIME = VirtualTime()


class Present:
    """The run whose history happens now."""

    run: SimulatedRun | None = None


def present() -> SimulatedRun:
    assert Present.run is not None
    return Present.run


@contextlib.contextmanager
def happening(run: SimulatedRun) -> Iterator[None]:
    """The history of this run happens: stand-ins belong to it."""
    Present.run, TIME.world, SimulatedPath.directories = run, run.world, run.directories
    try:
        yield
    finally:
        Present.run = TIME.world = None


def _process() -> Process:
    fiber = present().world.current
    assert fiber is not None
    return fiber.process


def _agent() -> SimulatedAgent:
    process = _process()
    assert isinstance(process, SimulatedAgent)
    return process


def _agent_client(find_driver: object, hello: Callable[[], dict[str, Any]], **how: Any) -> SimulatedControlClient:
    """An agent knows the driver's host and port, and later drivers of the run have the same."""
    client = SimulatedControlClient(present().driver_address, hello, **how)
    client.attach(_agent(), present().network)
    _agent().control = client
    return client


class QuietWakeup:
    """See Wakeup: nobody selects."""

    def notify(self) -> None: ...

    def clear(self) -> None: ...

    def close(self) -> None: ...

    def fileno(self) -> int:
        return -1


class Immediate:
    """See BackgroundCall: the call is made at once."""

    done = True

    def __init__(self, call: Callable[[], object]) -> None:
        self._result = call()

    def result(self) -> object:
        return self._result

    def fileno(self) -> int:
        return -1


class NoLines:
    """See LineTail: workers print nothing."""

    def __init__(self, path: object) -> None: ...

    def read_new(self) -> list[str]:
        return []


class SaveLock:
    """The lock file of workers that leave without a driver. It is free again when its holder is dead."""

    def __init__(self) -> None:
        self._holder: Process | None = None

    @contextlib.contextmanager
    def open(self, mode: str) -> Iterator[SaveLock]:
        try:
            yield self
        finally:
            if self._holder is _process():
                self._holder = None
                present().wake_all()

    def take(self, mode: int) -> None:
        fiber = present().world.current
        assert fiber is not None
        fiber.block(lambda: self._holder is None or not self._holder.alive)
        self._holder = fiber.process


def _replacements() -> dict[Any, dict[str, Any]]:
    return {
        run_driver: {
            "make_job_engine": lambda job, paths, fork_server, *, host_use: present().new_engine(),
            "open_control": lambda job, paths: present().new_control(),
            "EventWriter": lambda path, who: SimulatedStream(present().log, who),
            "RunStateReader": lambda events, snapshot: SimulatedReader(present().log),
            "LineTail": NoLines,
            "BackgroundCall": Immediate,
            "verify_model": lambda directory, *, weights_sha256: VerifiedModel(weights_sha256, 0),
            "write_receipt": lambda paths, receipt: None,
            "ensure_descriptors": lambda processes: None,
            "find_damage": lambda paths: None,
            "locked_seats": lambda paths: [],
            "read_plan_file": lambda paths: None,
        },
        agent: {"LineTail": lambda path: Tail(present().directories.lines[str(path)])},
        local: {
            "os": SimpleNamespace(kill=lambda pid, signal: present().workers[pid].terminate()),
            "find_orphans": lambda paths: [],
        },
        commands: {"fetch_welcome": lambda contact, tls_contexts: {"threads": 1}},
        join: {
            "ControlClient": _agent_client,
            "EventReader": lambda path: Tail(present().directories.events[str(path)]),
            "RunPaths": SimulatedPaths,
            "catch_stop_signals": lambda: contextlib.nullcontext(_agent().asked),
            "tempfile": SimpleNamespace(TemporaryDirectory=lambda prefix: contextlib.nullcontext(_agent().name)),
        },
        worker_group: {"host_id": lambda: "driver"},
        server_group: {"host_id": lambda: "driver"},
        control_client: {"Wakeup": QuietWakeup},
        worker: {"ControlClient": SimulatedControlClient},
        build: {"pack_model_code": lambda directory, base_dir: []},
        elastic: {
            "fcntl": SimpleNamespace(flock=lambda lock, mode: lock.take(mode), LOCK_EX=2),
            "open_lock_file": lambda lock: lock.open("r+"),
        },
        store: {
            "open_files": lambda path: SimulatedFiles(present().disk, _process()),
            "ThreadPoolExecutor": lambda workers, **_: FiberExecutor(_process()),
        },
        replicated: {
            "weights_sha256": lambda state: f"{_process().replica.link:064x}",  # type: ignore[attr-defined]
            "state_sha256": lambda state: f"{_process().replica.link:064x}",  # type: ignore[attr-defined]
            "export_model": lambda target, model, **options: None,
            "total_from_entry": lambda entry, layout, device: entry["total"],
        },
    }


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """While histories run."""
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("shoal.") and getattr(module, "time", None) is time:
                stack.enter_context(mock.patch.object(module, "time", TIME))
        for module, names in _replacements().items():
            for name, standin in names.items():
                stack.enter_context(mock.patch.object(module, name, standin))
        yield
