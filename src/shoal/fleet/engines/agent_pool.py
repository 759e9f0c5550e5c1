"""AgentPool: hosts that are asked for when seats need them, and given back when they do not."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from shoal.errors import ShoalError
from shoal.fleet.engine import Launch, Node
from shoal.fleet.engines.agent_records import AgentRecords
from shoal.fleet.engines.agents import AgentEngine, HostRetry, PlacedSeat
from shoal.fleet.engines.host_link import AgentHost, HostLink
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import Seat

IDLE_S = 3.0
"""How long a host without a seat is kept: a worker that died is replaced on it, without waiting in a queue again."""
REATTACH_TIMEOUT_S = 60.0
"""How long agents that outlived a driver have to answer the next one."""
REATTACH_POLL_S = 0.5


class AgentPool(AgentEngine):
    """See AgentEngine. One host per seat; a cluster's scheduler chooses which, and may take long.

    A seat starts as soon as it has a host; others may still wait. `make_host(number, gang)` makes a request to the
    scheduler, at most `max_hosts` at a time. `gang` has the numbers of those that are of use only together: `gang_size`
    of them, or one that replaces a lost one. If the first request fails, the job cannot run; later ones are made again.
    A host that would compute other bits than the first is given back.

    With `attach_host(number)`, agents outlive a driver that is killed, and another one takes them over.
    """

    def __init__(
        self,
        make_host: Callable[[int, range], AgentHost],
        paths: RunPaths,
        *,
        nodes: Sequence[Node],
        max_hosts: int,
        gang_size: int = 1,
        records: AgentRecords | None = None,
        attach_host: Callable[[int], AgentHost] | None = None,
    ) -> None:
        super().__init__([], paths)
        self._make_host = make_host
        self._attach_host = attach_host
        self._nodes = list(nodes)
        self._max_hosts = max_hosts
        self._gang_size = gang_size
        self._records = records
        self._numbers: dict[str, int] = {}  # of hosts that are on record
        self._requests = records.kept.requests if records else 0
        self._retry = HostRetry(0.0)
        self._one_was_ready = False
        self._idle_since_s: dict[str, float] = {}

    # ---- Engine ----

    def capacity(self) -> list[Node]:
        return list(self._nodes)

    def waiting(self) -> list[int]:
        return sorted(number for number, placed in self._seats.items() if placed.link is None)

    def reattach(self) -> list[Seat]:
        """Waits until each agent of the earlier driver has answered, or is gone."""
        if self._records is None or self._attach_host is None:
            return []
        for number in self._records.kept.numbers:
            host = self._attach_host(number)
            self._numbers[host.name] = number
            self._links[host.name] = HostLink(host, self._selector)
        until_s = time.monotonic() + REATTACH_TIMEOUT_S
        while (silent := self._silent_links()) and time.monotonic() < until_s:
            for link in silent:
                link.flush()
            self._selector.select(REATTACH_POLL_S)
            for link in silent:
                link.read()
        for link in silent:
            link.end()
        seats = [
            (seat, link) for link in self._links.values() for seat in link.outlived or () if self._gave(link, seat)
        ]
        for seat, link in seats:
            self._host_use.take(link.host.name)
            self._seats[seat.number] = PlacedSeat(Launch(seat, ""), time.monotonic(), link)
        return [self._seats[number].launch.seat for number in sorted(self._seats)]

    def close(self) -> None:
        super().close()
        for name in list(self._numbers):
            self._forget(name)

    # ---- hosts ----

    def _silent_links(self) -> list[HostLink]:
        return [link for link in self._links.values() if link.outlived is None and link.state != "lost"]

    def _gave(self, link: HostLink, seat: Seat) -> bool:
        """Whether the earlier driver gave this seat to this agent."""
        assert self._records is not None
        return self._records.kept.seats.get(self._numbers[link.host.name]) == seat.name

    def _note_placed(self, link: HostLink, seat: Seat) -> None:
        if self._records:
            self._records.give(self._numbers[link.host.name], seat)

    def _end_outlived(self, name: str) -> None:
        """What connected the agent was killed, and the agent waits for another driver: there is none."""
        assert self._attach_host is not None
        with contextlib.suppress(ShoalError):
            self._links[name] = HostLink(self._attach_host(self._numbers[name]), self._selector)
            self._links[name].end()

    def _forget(self, name: str) -> None:
        """The host is gone: the next driver need not look for it."""
        number = self._numbers.pop(name, None)
        if self._records and number is not None:
            self._records.remove(number)

    def _node_names(self) -> set[str]:
        return {node.name for node in self._nodes}

    def _connect(self) -> None:
        """Ask for the hosts that are missing, and give back those that were idle for a while."""
        missing = len(self.waiting()) - len(free := self._free_links())
        is_time = time.monotonic() >= self._retry.at_s and self._failure is None
        room = self._max_hosts - sum(not link.ended for link in self._links.values())
        if is_time:
            self._request_hosts(min(missing, room))
        self._give_back(free, -missing)

    def _request_hosts(self, count: int) -> None:
        """Those that make no whole gang replace lost members of another."""
        while count > 0:
            size = 1 if count % self._gang_size else self._gang_size
            gang = range(self._requests + 1, self._requests + 1 + size)
            for number in gang:
                self._requests = self._records.add() if self._records else number
                host = self._make_host(number, gang)
                if self._records:
                    self._numbers[host.name] = number
                try:
                    self._links[host.name] = HostLink(host, self._selector)
                except ShoalError as failure:
                    self._failure = failure
                    return
            count -= size

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
        name = link.host.name
        del self._links[name]
        if link.was_killed and not link.ended and name in self._numbers:
            self._end_outlived(name)
        else:
            self._forget(name)
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
