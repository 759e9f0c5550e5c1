"""A worker's services for its peers (state, state stream, residuals, link test), and its requests to theirs."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterable
from functools import partial
from typing import Any

from shoal.checkpoint.state_tree import State
from shoal.collectives import lane_residuals
from shoal.collectives.lane_residuals import LaneResiduals, ResidualStates
from shoal.collectives.outcome import Discarded
from shoal.collectives.state_server import StateServer, fetch_state
from shoal.collectives.state_stream import StatePublisher, StateSubscription
from shoal.collectives.transport.bandwidth import LinkSpeed, answer_link_test, measure_link
from shoal.collectives.transport.endpoint import Endpoint, Service, connect_to_peer
from shoal.collectives.transport.greeting import Greeting, Purpose
from shoal.net.address import ANY_PORT
from shoal.net.errors import LinkError
from shoal.net.tls import TlsContexts
from shoal.spec.view import Address, View

MEASURE_TIMEOUT_S = 10.0
"""Timeout in seconds of a link measurement; after it the link counts as unmeasured."""


class PeerServices:
    """Used by the training thread; `abort` may come from any thread."""

    def __init__(
        self, token: str, *, bind: str, ports: range = ANY_PORT, tls_contexts: TlsContexts | None = None
    ) -> None:
        self.token = token
        self.state_server = StateServer()
        self.state_publisher = StatePublisher()
        self.residuals = LaneResiduals()
        services: dict[Purpose, Service] = {
            "state": self.state_server.serve,
            "follow": lambda sock, greeting: self.state_publisher.serve(sock),
            "memory": self.residuals.serve,
            "pace": lambda sock, greeting: answer_link_test(sock),
        }
        self.endpoint = Endpoint(token, bind=bind, ports=ports, services=services, tls_contexts=tls_contexts)
        self._connect_to_peer = partial(connect_to_peer, tls_contexts=tls_contexts)
        self._lock = threading.Lock()
        self._open_socket: socket.socket | None = None
        self._aborted = 0

    def subscribe(self, address: Address, seat: int, *, view: int, max_bytes: int) -> StateSubscription | Discarded:
        """Subscribe to the state stream of a peer that continues to train."""
        try:
            sock = self._connect_to_peer(address, self.token, Greeting(purpose="follow", seat=seat, view=view))
            return StateSubscription(sock, max_bytes=max_bytes)
        except LinkError as failure:
            return Discarded(str(failure))

    def measure_link(self, view: View, seat: int) -> LinkSpeed | None:
        """Speed of the link to the view's source; None if the source is on this host or the measurement fails."""
        assert view.source is not None
        address = view.addresses[view.source]
        if address.host_id == self.endpoint.address.host_id:
            return None
        try:
            greeting = Greeting(purpose="pace", seat=seat, view=view.number)
            with self._connect_to_peer(address, self.token, greeting) as sock:
                self._register_socket(sock, view.number)
                sock.settimeout(MEASURE_TIMEOUT_S)
                return measure_link(sock)
        except LinkError:
            return None
        finally:
            with self._lock:
                self._open_socket = None

    def fetch_state(self, view: View, seat: int, *, max_bytes: int) -> State | Discarded:
        """Fetch the state of the view's source."""
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
        """Fetch the residuals of these lanes at a step, as far as the peer has them."""
        wanted = sorted(lanes)
        greeting = Greeting(purpose="memory", seat=seat, view=view.number, step=step, lanes=wanted)
        try:
            with self._connect_to_peer(view.addresses[source], self.token, greeting) as sock:
                self._register_socket(sock, view.number)
                return lane_residuals.receive_residuals(sock, step=step, lanes=wanted, floats=floats)
        except LinkError as failure:
            return Discarded(f"no residuals from worker-{source}: {failure}")
        finally:
            with self._lock:
                self._open_socket = None

    def _register_socket(self, sock: socket.socket, view: int) -> None:
        with self._lock:
            self._open_socket = sock
            if self._aborted >= view:
                raise LinkError("asked to stop")

    def abort(self, view: int) -> None:
        """End every fetch for this view or an older one."""
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
