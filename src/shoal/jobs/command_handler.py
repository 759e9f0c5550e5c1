"""The driver's side of `commands`: scale, drain, stop and inspect, and the status that answers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.fleet.messages import DrainRequest, InspectRequest, ScaleRequest, StopRequest, UserRequest
from shoal.jobs.server_group import ServerGroup
from shoal.net.errors import ProtocolError
from shoal.plan.membership_policy import MembershipPolicy


class CommandHandler:
    """`server_group` is None for a run without servers. `stop_requested` is set when a user stops the run,
    `user_scaled` when a user chose the number of workers. `inspect` asks the workers without the run's directory."""

    def __init__(
        self,
        membership: MembershipPolicy,
        server_group: ServerGroup | None,
        *,
        inspect: Callable[[InspectRequest], None] = lambda request: None,
    ) -> None:
        self.stop_requested = ""
        self.user_scaled = False
        self._membership = membership
        self._server_group = server_group
        self._inspect = inspect

    def handle(self, request: UserRequest) -> None:
        """Carry out a command. ProtocolError if it asks for servers in a run without; then nothing is changed."""
        match request:
            case ScaleRequest():
                self._scale(request)
            case DrainRequest(role="server"):
                self._servers.drain(request.seat)
            case DrainRequest():
                self.user_scaled = True
                self._membership.drain(request.seat, "drained", replace=False)
            case StopRequest():
                self.stop_requested = "stopped"
            case InspectRequest():
                self._inspect(request)

    def status(self) -> dict[str, Any]:
        return {
            "wanted": self._membership.wanted_workers,
            "lanes": self._membership.lanes,
            "workers": sorted(self._membership.members),
            "stopping": self._membership.stop_reason,
            "servers_wanted": self._server_group.wanted if self._server_group else 0,
            "servers": self._server_group.connected_seats if self._server_group else [],
        }

    def _scale(self, request: ScaleRequest) -> None:
        if request.servers is not None:
            self._servers.scale(request.servers)
        if request.wanted is not None:
            self.user_scaled = True
            self._membership.scale(request.wanted)

    @property
    def _servers(self) -> ServerGroup:
        if self._server_group is None:
            raise ProtocolError("the run has no servers")
        return self._server_group
