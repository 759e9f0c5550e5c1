"""AgentPool: hosts that are asked for when seats need them, and given back when they do not."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from shoal.errors import ShoalError
from shoal.fleet.engine import Node
from shoal.fleet.engines.agents import AgentEngine, HostRetry, PlacedSeat
from shoal.fleet.engines.host_link import AgentHost, HostLink
from shoal.spec.run_paths import RunPaths

IDLE_S = 3.0
"""How long a host without a seat is kept: a worker that died is replaced on it, without waiting in a queue again."""


class AgentPool(AgentEngine):
    """See AgentEngine. One host per seat; a cluster's scheduler chooses which, and may take long.

    A seat starts as soon as it has a host; others may still wait. `make_host(number)` makes a request to the scheduler,
    at most `max_hosts` at a time. If the first request fails, the job cannot run; later ones are made again. A host
    that would compute other bits than the first is given back.
    """

    def __init__(
        self, make_host: Callable[[int], AgentHost], paths: RunPaths, *, nodes: Sequence[Node], max_hosts: int
    ) -> None:
        super().__init__([], paths)
        self._make_host = make_host
        self._nodes = list(nodes)
        self._max_hosts = max_hosts
        self._requests = 0
        self._retry = HostRetry(0.0)
        self._one_was_ready = False
        self._idle_since_s: dict[str, float] = {}

    # ---- Engine ----

    def capacity(self) -> list[Node]:
        return list(self._nodes)

    def waiting(self) -> list[int]:
        return sorted(number for number, placed in self._seats.items() if placed.link is None)

    # ---- hosts ----

    def _node_names(self) -> set[str]:
        return {node.name for node in self._nodes}

    def _connect(self) -> None:
        """Ask for the hosts that are missing, and give back those that were idle for a while."""
        missing = len(self.waiting()) - len(free := self._free_links())
        is_time = time.monotonic() >= self._retry.at_s and self._failure is None
        room = self._max_hosts - sum(not link.ended for link in self._links.values())
        for _ in range(min(missing, room) if is_time else 0):
            self._requests += 1
            host = self._make_host(self._requests)
            try:
                self._links[host.name] = HostLink(host, self._selector)
            except ShoalError as failure:
                self._failure = failure
                return
        self._give_back(free, -missing)

    def _free_links(self) -> list[HostLink]:
        """Hosts that have no seat and may get one, those that are ready first."""
        used = {placed.link.host.name for placed in self._seats.values() if placed.link}
        free = [link for name, link in self._links.items() if name not in used]
        return sorted(
            (link for link in free if link.usable or (link.state == "starting" and not link.ended)),
            key=lambda link: link.state != "ready",
        )

    def _give_back(self, free: Sequence[HostLink], surplus: int) -> None:
        now = time.monotonic()
        idle = {link.host.name: link for link in free[len(free) - surplus :]} if surplus > 0 else {}
        idle |= {name: link for name, link in self._links.items() if link.leaving and not self._has_seat(link)}
        self._idle_since_s = {name: self._idle_since_s.get(name, now) for name in idle}
        for name, since_s in self._idle_since_s.items():
            if now >= since_s + IDLE_S and not idle[name].ended:
                idle[name].end()

    def _has_seat(self, link: HostLink) -> bool:
        return any(placed.link is link for placed in self._seats.values())

    def _handle_lost(self, link: HostLink) -> None:
        del self._links[link.host.name]
        if link.failure is not None and not link.ended:
            if not self._one_was_ready:
                self._failure = link.failure
            self._retry.postpone()
        self._end_seats_of(link)

    def _check_platform(self, link: HostLink) -> None:
        self._reference = self._reference or (link.host.name, link.platform)
        difference = None if link.ended else self._difference(link)
        if difference is None:
            self._one_was_ready = True
        elif any(placed.link for placed in self._seats.values()):
            self._retry.postpone()
            link.end()
        else:
            self._failure = difference

    # ---- seats ----

    def _may_place(self) -> bool:
        return self._one_was_ready

    def _choose(self, placed: PlacedSeat) -> HostLink | None:
        return next((link for link in self._free_links() if link.usable), None)

    def _gives_up(self, placed: PlacedSeat) -> bool:
        return False

    def _reset_retry(self, link: HostLink) -> None:
        self._retry = HostRetry(0.0)
