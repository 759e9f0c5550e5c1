"""The driver's side of `commands`: scale, drain and stop, and the status that answers them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.jobs.server_group import ServerGroup
from shoal.plan.membership_policy import MembershipPolicy
from shoal.spec.job import MAX_WORKERS


class CommandHandler:
    """`server_group` is None for a run without servers. `stop_requested` is set when a user stops the run,
    `user_scaled` when a user chose the number of workers."""

    def __init__(self, membership: MembershipPolicy, server_group: ServerGroup | None) -> None:
        self.stop_requested = ""
        self.user_scaled = False
        self._membership = membership
        self._server_group = server_group

    def handle(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Carry out a command. KeyError, TypeError or ValueError if it is malformed; then nothing is changed."""
        if kind == "scale":
            self._scale({who: int(fields[who]) for who in ("wanted", "servers") if who in fields})
        elif kind == "drain" and fields.get("role") == "server":
            self._servers.drain(int(fields["seat"]))
        elif kind == "drain":
            self.user_scaled = True
            self._membership.drain(int(fields["seat"]), "drained", replace=False)
        elif kind == "stop":
            self.stop_requested = "stopped"
        else:
            raise ValueError(kind)

    def status(self) -> dict[str, Any]:
        return {
            "wanted": self._membership.wanted_workers,
            "lanes": self._membership.lanes,
            "workers": sorted(self._membership.members),
            "stopping": self._membership.stop_reason,
            "servers_wanted": self._server_group.wanted if self._server_group else 0,
            "servers": self._server_group.connected_seats if self._server_group else [],
        }

    def _scale(self, numbers: Mapping[str, int]) -> None:
        if not numbers or not all(1 <= number <= MAX_WORKERS for number in numbers.values()):
            raise ValueError(f"scale to {dict(numbers)}")
        if "servers" in numbers:
            self._servers.scale(numbers["servers"])
        if "wanted" in numbers:
            self.user_scaled = True
            self._membership.scale(numbers["wanted"])

    @property
    def _servers(self) -> ServerGroup:
        if self._server_group is None:
            raise ValueError("a run without servers")
        return self._server_group
