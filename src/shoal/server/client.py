"""A worker's end: pull values, push gradients. It needs numpy, and no torch.

What can go wrong on the way is dealt with inside: servers that die are replaced, and what has no answer yet is asked
again of whoever is in charge then. Nothing is applied twice.
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

from shoal.errors import ShoalError, error
from shoal.fleet.contact import Contact
from shoal.fleet.tie import Tie
from shoal.parallel.links.memory import Arena, Memory
from shoal.parallel.server.client import Client as Lines
from shoal.parallel.server.client import Entry, Errand, RefusedError
from shoal.parallel.server.errands import Laid, LanePush, Pull, PullAll, Push
from shoal.server import holding
from shoal.server.flat import Arrays, Flat
from shoal.server.terms import PATIENCE_S, TRAINING_VIEW, ServerTerms, write_into
from shoal.spec.view import View
from shoal.wire.door import call_host
from shoal.wire.handshake import LinkError, TokenError

TOKEN_VARIABLE = "SHOAL_TOKEN"  # noqa: S105
WELCOME_S = 10.0


def connect(address: str, *, worker: int, token: str | None = None, timeout_s: float | None = None) -> Client:
    """Be worker number `worker` of the servers at `address` (HOST:PORT).

    The token is that of the environment (SHOAL_TOKEN) if none is given. A call that has no answer after `timeout_s`
    raises SH707; None waits for ever, as a worker does that must wait for others.
    """
    contact = _contact(address, token or os.environ.get(TOKEN_VARIABLE, ""))
    _knock(contact)
    client = Client(contact, worker, timeout_s=timeout_s)
    try:
        client._come()
    except BaseException:
        client.close()
        raise
    return client


class Client:
    """Made by `connect`; used by one thread at a time. `step` is the step that the next push is for."""

    def __init__(self, contact: Contact, worker: int, *, timeout_s: float | None) -> None:
        self.worker = worker
        self.step = 0
        self._contact = contact
        self._timeout_s = timeout_s
        self._until_s: float | None = None
        self._end: ShoalError | None = None
        self._view: View | None = None
        self._inside = False
        self._away = False
        self._present: list[int] = []
        self._one_at_a_time = threading.Lock()
        self._lines = Lines(worker, contact.token, aborted=lambda: self._trouble() is not None)
        self._tie = Tie(
            self._find,
            self._hello,
            beat=self._beat,
            on_view=self._see,
            on_table=self._lines.learn,
            on_welcome=self._be_welcomed,
        )

    def _come(self) -> None:
        welcome = self._tie.connect(WELCOME_S)
        if self._end:
            raise self._end
        self._terms = ServerTerms.model_validate(welcome["terms"])
        self._flat = Flat(self._terms.like)
        self._arena = Arena(self._flat.size_bytes)
        self._rooms = self._flat.views(self._arena.memory.raw)
        self._memory = Memory.private(self._flat.size_bytes)
        self._values = self._flat.views(self._memory.raw)
        with self._alone():
            self._enter()

    # ---- for users ----

    @property
    def workers(self) -> int:
        return self._terms.workers

    def pull(self, *, out: Arrays | None = None) -> Arrays:
        """The newest values, as arrays of one's own; or copied into the arrays of `out`."""
        with self._alone():
            self._run(Pull(self._flat, self._memory))
            return self._given(out)

    def push(
        self,
        gradients: Mapping[str, Any],
        *,
        step: int | None = None,
        lr: float | None = None,
        out: Arrays | None = None,
    ) -> Arrays:
        """Have gradients applied. Returns the new values when they are applied and replicated, and when this worker may
        go on: with staleness 0 all workers have pushed the step by then, with k none is more than k steps behind.

        A `step` before `self.step` has been applied already: the values are returned and nothing else happens. `lr`
        takes the place of the optimizer's; with staleness 0 all workers should give the same.
        """
        with self._alone():
            if self._away:
                self._enter()
            write_into(self._rooms, gradients, divisor=self.workers if self._terms.together else 1)
            wanted = self.step if step is None else step
            if wanted > self.step:
                raise error("SH706", f"step {wanted} is pushed where step {self.step} is next")
            self._run(Pull(self._flat, self._memory) if wanted < self.step else self._push(wanted, lr))
            self.step = max(self.step, wanted + 1)
            return self._given(out)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Values, optimizer state and steps in one safetensors file, for `start(from_=...)`. With staleness 0, between
        two pushes of this worker, it is exactly one step; else workers go on while it is gathered."""
        with self._alone():
            found = pulled(self._run, self._flat, together=self._terms.together)
        holding.save(found, path, optimizer=self._terms.optimizer.model_dump())

    def close(self) -> None:
        """Leave: where staleness is above 0, others do not wait for this worker any more."""
        self._tie.close()
        self._lines.close()
        if (arena := getattr(self, "_arena", None)) is not None:
            arena.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- errands ----

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """The time for an answer begins now."""
        if not self._one_at_a_time.acquire(blocking=False):
            raise error("SH706", "two threads use one client", fix="Let one thread of a worker push and pull.")
        try:
            self._until_s = None if self._timeout_s is None else time.monotonic() + self._timeout_s
            yield
        finally:
            self._until_s = None
            self._one_at_a_time.release()

    def _run(self, errand: Errand) -> None:
        with self._told():
            self._lines.run(errand)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except RefusedError as failure:
            raise error("SH706", f"a server refuses: {failure}") from failure
        except LinkError as failure:
            self._lines.hang_up()
            raise (self._trouble() or error("SH703", str(failure))) from failure

    def _push(self, step: int, lr: float | None, *, empty: bool = False) -> Errand:
        hyper, partials = self._terms.hyper(lr), Laid(self._arena.memory, self._flat)
        if self._terms.together:
            return Push(self._flat, self._memory, partials, step, filled=1, flags_sent=0, hyper=hyper)
        share = 1 / self.workers
        return LanePush(self._flat, self._memory, partials, step, 0, self.worker, share, hyper, empty)

    def _given(self, out: Arrays | None) -> Arrays:
        if out is None:
            return {name: value.copy() for name, value in self._values.items()}
        for name, value in self._values.items():
            out[name][...] = value
        return out

    def _enter(self) -> None:
        """Be let in by the servers, at the step that they say. Who was away goes on beside the slowest."""
        self._lines.hang_up()
        away, self._away = self._away, False
        words = {"carries": self._terms.carries, "model": self._terms.model}
        entry = Entry(TRAINING_VIEW, words, self._arena)
        entry.ready = True  # whoever started the servers has set what they hold
        with self._told():
            clocks = self._lines.enter(entry)
        self.step = clocks[0] if self._terms.together else clocks[self.worker]
        if away and not self._terms.together:
            self._leap(min((clocks[other] for other in self._present), default=0))
        self._inside = True
        self._tie.say("in")

    def _leap(self, step: int) -> None:
        """Go on at this step, if it is ahead: nobody should wait for all that was missed."""
        if step > self.step:
            self._run(self._push(step - 1, None, empty=True))
            self.step = step

    # ---- in the tie's thread ----

    def _find(self) -> Contact:
        if self._tie.alone_s > PATIENCE_S:
            self._end = error("SH703", f"nobody answers at {self._contact.host}:{self._contact.port} any more")
        self._lines.wake()
        return self._contact

    def _hello(self) -> dict[str, Any]:
        me = {"worker": self.worker, "pid": os.getpid(), "host": socket.gethostname()}
        return {"role": "client", **me, "in": self._inside}

    def _be_welcomed(self, fields: dict[str, Any]) -> None:
        if refused := str(fields.get("refused", "")):
            self._end = error("SH704", refused)
            self._lines.wake()
        self._present = [int(worker) for worker in fields.get("present", [])]
        self._away = self._away or bool(fields.get("away"))

    def _see(self, view: View) -> None:
        self._view = view
        if view.stop:
            self._end = error("SH703", view.stop)
            self._lines.wake()

    def _beat(self) -> dict[str, Any]:
        if self._until_s is not None and time.monotonic() > self._until_s:
            self._lines.wake()
        return {"step": self.step}

    def _trouble(self) -> ShoalError | None:
        until_s = self._until_s
        if self._end is None and until_s is not None and time.monotonic() > until_s:
            return error("SH707", f"no answer in {self._timeout_s:g} s{self._missing()}")
        return self._end

    def _missing(self) -> str:
        """Who is not connected."""
        here = self._view.carries if self._view else range(self.workers)
        gone = [str(worker) for worker in range(self.workers) if worker not in here]
        return f"; not connected: worker {', '.join(gone)}" if gone else ""


def pulled(run: Any, flat: Flat, *, together: bool) -> holding.Holding:
    """All that servers hold. If the table changes on the way, parts overlap and are asked for again."""
    pull = PullAll()
    while not pull.whole(len(flat.cuts) - 1):
        pull = PullAll()
        run(pull)
    return holding.gathered(flat, pull.found, together=together)


def _contact(address: str, token: str) -> Contact:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise error(
            "SH610", f"'{address}' is not an address", fix="Write HOST:PORT, as `address` of the servers has it."
        )
    if not token:
        raise error("SH615", "there is no token", fix=f"Give token=, or set {TOKEN_VARIABLE}.")
    return Contact(host.strip("[]"), int(port), token)


def _knock(contact: Contact) -> None:
    """Say at once what is wrong with an address or a token."""
    try:
        call_host(contact.host, contact.port, contact.token, json.dumps({"role": "knock"}).encode()).close()
    except TokenError as failure:
        fix = "Give the `token` of the servers that were started."
        raise error("SH615", "the servers have another token", where=contact.host, fix=fix) from failure
    except LinkError as failure:
        raise error("SH610", str(failure), fix="See that the servers run, and can be reached from here.") from failure
