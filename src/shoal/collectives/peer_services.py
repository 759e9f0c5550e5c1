"""This worker among the others: where they reach it, and how it gets at what they hold."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterable
from functools import partial
from typing import Any

from shoal.checkpoint.state_tree import State
from shoal.collectives import residuals
from shoal.collectives.outcome import Discarded
from shoal.collectives.residuals import LaneResiduals, ResidualStates
from shoal.collectives.state_server import StateServer, fetch_state
from shoal.collectives.state_stream import StatePublisher, StateSubscription
from shoal.collectives.transport.bandwidth import LinkSpeed, answer_link_test, measure_link
from shoal.collectives.transport.endpoint import Endpoint, connect_to_peer
from shoal.net.errors import LinkError
from shoal.net.tls import TlsContexts
from shoal.spec.view import Address, View

MEASURE_TIMEOUT_S = 10.0
"""Whoever stands still for so long while a link is measured need not be measured."""


class PeerServices:
    """Used by the training thread; `abort` may come from any."""

    def __init__(self, token: str, *, bind: str, tls_contexts: TlsContexts | None = None) -> None:
        self.token = token
        self.state_server = StateServer()
        self.state_publisher = StatePublisher()
        self.residuals = LaneResiduals()
        self.endpoint = Endpoint(token, bind=bind, serve=self._serve, tls_contexts=tls_contexts)
        self._connect_to_peer = partial(connect_to_peer, tls_contexts=tls_contexts)
        self._lock = threading.Lock()
        self._open_socket: socket.socket | None = None
        self._aborted = 0

    def _serve(self, sock: socket.socket, hello: dict[str, Any]) -> None:
        if hello["purpose"] == "follow":
            self.state_publisher.serve(sock)
        elif hello["purpose"] == "memory":
            self.residuals.serve(sock, hello)
        elif hello["purpose"] == "pace":
            answer_link_test(sock)
        else:
            self.state_server.serve(sock, hello)

    def subscribe(self, address: Address, seat: int, *, view: int, max_bytes: int) -> StateSubscription | Discarded:
        """Be fed by a peer that goes on training."""
        try:
            return StateSubscription(
                self._connect_to_peer(address, self.token, purpose="follow", seat=seat, view=view), max_bytes=max_bytes
            )
        except LinkError as failure:
            return Discarded(str(failure))

    def measure_link(self, view: View, seat: int) -> LinkSpeed | None:
        """Of the link to the view's source, if that is on another host; None if it is not, or could not be measured."""
        assert view.source is not None
        address = view.addresses[view.source]
        if address.host_id == self.endpoint.address.host_id:
            return None
        try:
            with self._connect_to_peer(address, self.token, purpose="pace", seat=seat, view=view.number) as sock:
                self._register_socket(sock, view.number)
                sock.settimeout(MEASURE_TIMEOUT_S)
                return measure_link(sock)
        except LinkError:
            return None
        finally:
            with self._lock:
                self._open_socket = None

    def fetch_state(self, view: View, seat: int, *, max_bytes: int) -> State | Discarded:
        """The state of the view's source."""
        assert view.source is not None
        try:
            return fetch_state(
                view.addresses[view.source],
                self.token,
                seat=seat,
                view=view.number,
                max_bytes=max_bytes,
                connect=self._connect_to_peer,
                on_connect=lambda sock: self._register_socket(sock, view.number),
            )
        except LinkError as failure:
            return Discarded(f"no state from worker-{view.source}: {failure}")
        finally:
            with self._lock:
                self._open_socket = None

    def fetch_residuals(
        self, view: View, seat: int, *, source: int, step: int, lanes: Iterable[int], floats: int
    ) -> ResidualStates | Discarded:
        """What a peer knows of what these lanes remember at a step."""
        wanted = sorted(lanes)
        try:
            with self._connect_to_peer(
                view.addresses[source],
                self.token,
                purpose="memory",
                seat=seat,
                view=view.number,
                step=step,
                lanes=wanted,
            ) as sock:
                self._register_socket(sock, view.number)
                return residuals.receive_residuals(sock, step=step, lanes=wanted, floats=floats)
        except LinkError as failure:
            return Discarded(f"no memory from worker-{source}: {failure}")
        finally:
            with self._lock:
                self._open_socket = None

    def _register_socket(self, sock: socket.socket, view: int) -> None:
        with self._lock:
            self._open_socket = sock
            if self._aborted >= view:
                raise LinkError("asked to stop")

    def abort(self, view: int) -> None:
        """Whoever fetches for this view, or an older one, gives up."""
        with self._lock:
            self._aborted = max(self._aborted, view)
            if self._open_socket is not None:
                with contextlib.suppress(OSError):
                    self._open_socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.state_publisher.drop_subscribers()
        self.state_server.close()
        self.endpoint.close()

    def stats(self) -> dict[str, Any]:
        return {"refused": self.endpoint.refused, "served_bytes": self.state_server.served_bytes}
