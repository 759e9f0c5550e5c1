"""A worker's client: pulls values, pushes gradients. It needs numpy, and no torch.

It handles failures by itself: a server that dies is replaced, and requests without a reply are repeated to the new
primary. Every push is applied exactly once.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

from shoal.collectives.transport.shared_memory import ByteBuffer, SharedMemory
from shoal.errors import ShoalError, error
from shoal.fleet.control_client import ControlClient
from shoal.fleet.driver_address import DriverAddress
from shoal.net.address import parse_address
from shoal.net.errors import LinkError, TokenError
from shoal.net.listener import connect_host
from shoal.paramserver.client import ParameterServerClient, RefusedError, Request, ViewEntry
from shoal.paramserver.requests import CopiedPush, LanePush, Pull, PullState, Push
from shoal.server import snapshot
from shoal.server.config import PATIENCE_S, TRAINING_VIEW, StandaloneServerConfig, copy_gradients
from shoal.server.numpy_layout import Arrays, NumpyLayout
from shoal.spec.view import View

TOKEN_VARIABLE = "SHOAL_TOKEN"  # noqa: S105
WELCOME_S = 10.0


def connect(address: str, *, worker: int, token: str | None = None, timeout_s: float | None = None) -> Client:
    """Connect to the servers at `address` (HOST:PORT) as worker number `worker`.

    Without `token` the environment's SHOAL_TOKEN is used. A call without an answer after `timeout_s` raises SH707; None
    waits forever, which suits workers that must wait for each other.
    """
    driver_address = _parse_address(address, token or os.environ.get(TOKEN_VARIABLE, ""))
    _probe_address(driver_address)
    client = Client(driver_address, worker, timeout_s=timeout_s)
    try:
        client._connect()
    except BaseException:
        client.close()
        raise
    return client


class Client:
    """Made by `connect`; used by one thread at a time. `step` is the step that the next push is for."""

    def __init__(self, driver_address: DriverAddress, worker: int, *, timeout_s: float | None) -> None:
        self.worker = worker
        self.step = 0
        self._driver_address = driver_address
        self._timeout_s = timeout_s
        self._deadline_s: float | None = None
        self._fatal_error: ShoalError | None = None
        self._view: View | None = None
        self._entered = False
        self._rejoining = False
        self._present_workers: list[int] = []
        self._lock = threading.Lock()
        self._server_client = ParameterServerClient(
            worker, driver_address.token, aborted=lambda: self._current_error() is not None
        )
        self._control_client = ControlClient(
            self._locate_driver,
            self._hello,
            heartbeat=self._heartbeat,
            on_view=self._on_view,
            on_chunk_table=self._server_client.set_chunk_table,
            on_welcome=self._on_welcome,
        )

    def _connect(self) -> None:
        welcome = self._control_client.connect(WELCOME_S)
        if self._fatal_error:
            raise self._fatal_error
        self._config = StandaloneServerConfig.model_validate(welcome["terms"])
        self._layout = NumpyLayout(self._config.like)
        self._push_memory = SharedMemory(self._layout.size_bytes)
        self._gradient_views = self._layout.views(self._push_memory.buffer.raw)
        self._value_memory = ByteBuffer.private(self._layout.size_bytes)
        self._value_views = self._layout.views(self._value_memory.raw)
        with self._exclusive_call():
            self._enter_servers()

    # ---- for users ----

    @property
    def workers(self) -> int:
        return self._config.workers

    def pull(self, *, out: Arrays | None = None) -> Arrays:
        """The newest values, as new arrays or copied into the arrays of `out`."""
        with self._exclusive_call():
            self._run(Pull(self._layout, self._value_memory))
            return self._copy_values(out)

    def push(
        self,
        gradients: Mapping[str, Any],
        *,
        step: int | None = None,
        lr: float | None = None,
        out: Arrays | None = None,
    ) -> Arrays:
        """Push gradients. Returns the new values when the gradients are applied and replicated, and this worker may
        continue: with staleness 0 all workers have pushed the step by then, with k none is more than k steps behind.

        A `step` before `self.step` is already applied: the current values are returned, and nothing else happens. `lr`
        replaces the optimizer's; with staleness 0 all workers should give the same.
        """
        with self._exclusive_call():
            if self._rejoining:
                self._enter_servers()
            copy_gradients(self._gradient_views, gradients, divisor=self.workers if self._config.synchronous else 1)
            wanted = self.step if step is None else step
            if wanted > self.step:
                raise error("SH706", f"step {wanted} is pushed, but step {self.step} is next")
            self._run(Pull(self._layout, self._value_memory) if wanted < self.step else self._push_request(wanted, lr))
            self.step = max(self.step, wanted + 1)
            return self._copy_values(out)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save values, optimizer state and steps to one safetensors file, for `start(from_=...)`. With staleness 0 the
        file has exactly the state between two pushes of this worker; otherwise other workers push meanwhile."""
        with self._exclusive_call():
            pulled = pull_snapshot(self._run, self._layout, synchronous=self._config.synchronous)
        snapshot.save(pulled, path, optimizer=self._config.optimizer.model_dump())

    def close(self) -> None:
        """Disconnect. With staleness above 0 other workers no longer wait for this one."""
        self._control_client.close()
        self._server_client.close()
        if (push_memory := getattr(self, "_push_memory", None)) is not None:
            push_memory.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- requests ----

    @contextlib.contextmanager
    def _exclusive_call(self) -> Iterator[None]:
        """One call at a time; the timeout starts now."""
        if not self._lock.acquire(blocking=False):
            raise error("SH706", "two threads use one client", fix="Let one thread of a worker push and pull.")
        try:
            self._deadline_s = None if self._timeout_s is None else time.monotonic() + self._timeout_s
            yield
        finally:
            self._deadline_s = None
            self._lock.release()

    def _run(self, request: Request) -> None:
        with self._translate_errors():
            self._server_client.run(request)

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except RefusedError as failure:
            raise error("SH706", f"a server refused: {failure}") from failure
        except LinkError as failure:
            self._server_client.disconnect_all()
            raise (self._current_error() or error("SH703", str(failure))) from failure

    def _push_request(self, step: int, lr: float | None, *, empty: bool = False) -> Request:
        hyper, partials = self._config.encode_hyperparameters(lr), CopiedPush(self._push_memory.buffer, self._layout)
        if self._config.synchronous:
            return Push(self._layout, self._value_memory, partials, step, filled_mask=1, request_flags=0, hyper=hyper)
        share = 1 / self.workers
        return LanePush(self._layout, self._value_memory, partials, step, 0, self.worker, share, hyper, empty)

    def _copy_values(self, out: Arrays | None) -> Arrays:
        if out is None:
            return {name: value.copy() for name, value in self._value_views.items()}
        for name, value in self._value_views.items():
            out[name][...] = value
        return out

    def _enter_servers(self) -> None:
        """Open a session with every server and adopt the step they report. A client that had lost its connection
        resumes at the slowest client's step."""
        self._server_client.disconnect_all()
        rejoining, self._rejoining = self._rejoining, False
        entry = ViewEntry(TRAINING_VIEW, self._config.enter_fields(TRAINING_VIEW), self._push_memory)
        entry.ready = True  # the process that started the servers has set their state
        with self._translate_errors():
            clocks = self._server_client.enter(entry)
        self.step = clocks[0] if self._config.synchronous else clocks[self.worker]
        if rejoining and not self._config.synchronous:
            self._skip_to(min((clocks[other] for other in self._present_workers), default=0))
        self._entered = True
        self._control_client.send("in")

    def _skip_to(self, step: int) -> None:
        """Continue at this step if it is ahead, so that other workers do not wait for the missed steps."""
        if step > self.step:
            self._run(self._push_request(step - 1, None, empty=True))
            self.step = step

    # ---- called by the control client's thread ----

    def _locate_driver(self) -> DriverAddress:
        if self._control_client.driver_silence_s > PATIENCE_S:
            self._fatal_error = error(
                "SH703", f"{self._driver_address.host}:{self._driver_address.port} does not answer any more"
            )
        self._server_client.wake()
        return self._driver_address

    def _hello(self) -> dict[str, Any]:
        identity = {"worker": self.worker, "pid": os.getpid(), "host": socket.gethostname()}
        return {"role": "client", **identity, "in": self._entered}

    def _on_welcome(self, fields: dict[str, Any]) -> None:
        if refused := str(fields.get("refused", "")):
            self._fatal_error = error("SH704", refused)
            self._server_client.wake()
        self._present_workers = [int(worker) for worker in fields.get("present", [])]
        self._rejoining = self._rejoining or bool(fields.get("away"))

    def _on_view(self, view: View) -> None:
        self._view = view
        if view.stop:
            self._fatal_error = error("SH703", view.stop)
            self._server_client.wake()

    def _heartbeat(self) -> dict[str, Any]:
        if self._deadline_s is not None and time.monotonic() > self._deadline_s:
            self._server_client.wake()
        return {"step": self.step}

    def _current_error(self) -> ShoalError | None:
        deadline_s = self._deadline_s
        if self._fatal_error is None and deadline_s is not None and time.monotonic() > deadline_s:
            return error("SH707", f"no answer in {self._timeout_s:g} s{self._missing_workers()}")
        return self._fatal_error

    def _missing_workers(self) -> str:
        """The end of a message that names the workers without a connection."""
        connected = self._view.carries if self._view else range(self.workers)
        missing = [str(worker) for worker in range(self.workers) if worker not in connected]
        return f"; not connected: worker {', '.join(missing)}" if missing else ""


def pull_snapshot(run: Any, layout: NumpyLayout, *, synchronous: bool) -> snapshot.ServerSnapshot:
    """The servers' whole state. If the chunk table changes meanwhile, replies overlap, and all is pulled again."""
    pull = PullState()
    while not pull.is_complete(len(layout.cuts) - 1):
        pull = PullState()
        run(pull)
    return snapshot.snapshot_from_chunks(layout, pull.replies, synchronous=synchronous)


def _parse_address(address: str, token: str) -> DriverAddress:
    try:
        host, port = parse_address(address)
    except ValueError as failure:
        raise error("SH610", str(failure), fix="Write HOST:PORT, as `address` of the servers has it.") from failure
    if not token:
        raise error("SH615", "there is no token", fix=f"Give token=, or set {TOKEN_VARIABLE}.")
    return DriverAddress(host, port, token)


def _probe_address(driver_address: DriverAddress) -> None:
    """Report a wrong address or token at once."""
    try:
        connect_host(
            driver_address.host, driver_address.port, driver_address.token, json.dumps({"role": "knock"}).encode()
        ).close()
    except TokenError as failure:
        fix = "Give the `token` of the servers that were started."
        raise error("SH615", "the servers have another token", where=driver_address.host, fix=fix) from failure
    except LinkError as failure:
        fix = "Check that the servers run, and that this machine can reach them."
        raise error("SH610", str(failure), fix=fix) from failure
