"""AgentEngine: workers and servers on hosts that share nothing with the driver, each host with an agent."""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal import __version__
from shoal.errors import ShoalError, error, error_from_fields
from shoal.fleet.agents.agent import LaunchCommand, StopCommand
from shoal.fleet.agents.agent_pipe import PipeReport
from shoal.fleet.engine import Exit, Launch, Node
from shoal.fleet.engines.host_link import AgentHost, HostLink
from shoal.fleet.engines.host_use import UNREACHABLE, HostUse
from shoal.fleet.messages import ExitedReport, OutputReport
from shoal.fleet.platform_facts import describe_difference
from shoal.fleet.process_main import HOST_VARIABLE
from shoal.net.wakeup import Wakeup
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import Seat

MAX_STARTING = 8
"""Hosts that are connected to at the same time: sshd drops a burst of more (MaxStartups)."""
MIN_RETRY_S, MAX_RETRY_S = 1.0, 30.0
KILL_CONFIRM_S = 3.0
"""A killed seat counts as ended after so long, even if its host does not confirm it: it is fenced by the driver."""
ROOM_WAIT_S = 20.0
"""How long a seat waits for a lost host to come back, before it makes another host fuller than it should be."""
NO_HOST_S = 60.0
"""How long a seat waits for a host if none can be reached."""


@dataclass
class PlacedSeat:
    """A seat that was launched. `link` is None until it is sent to a host."""

    launch: Launch
    waiting_since_s: float
    link: HostLink | None = None
    kill_until_s: float | None = None


@dataclass
class HostRetry:
    """When a lost host is tried again, and how long it waits the next time."""

    at_s: float
    pause_s: float = MIN_RETRY_S

    def postpone(self) -> None:
        self.at_s = time.monotonic() + self.pause_s
        self.pause_s = min(2 * self.pause_s, MAX_RETRY_S)


class AgentEngine:
    """See Engine. The processes end with their agent, and agents with their driver: nothing is left to reattach.

    Nothing starts before every host is ready: a host that cannot be used, or would compute other bits, is an error at
    the start. A host that is lost later is one more failure to survive: it is tried again, and the others take over.
    Runs beside this one, and later ones of the same process, do not wait for it either: see HostUse.
    """

    def __init__(self, hosts: Sequence[AgentHost], paths: RunPaths, *, host_use: HostUse | None = None) -> None:
        self._hosts = {host.name: host for host in hosts}
        self._paths = paths
        self._host_use = host_use or HostUse()
        self._selector = selectors.DefaultSelector()
        self._links: dict[str, HostLink] = {}
        self._retries: dict[str, HostRetry] = {host.name: HostRetry(0.0) for host in hosts}
        self._all_were_ready = False
        self._reference: tuple[str, dict[str, str]] | None = None  # the first ready host and its platform
        self._seats: dict[int, PlacedSeat] = {}
        self._exits: list[Exit] = []
        self._exited = Wakeup()
        self._selector.register(self._exited, selectors.EVENT_READ)
        self._failure: ShoalError | None = None

    # ---- Engine ----

    def capacity(self) -> list[Node]:
        leaving = {name for name, link in self._links.items() if link.leaving}
        return [host.node for name, host in self._hosts.items() if name not in leaving]

    def start(self, launches: Sequence[Launch]) -> None:
        for launch in launches:
            if launch.seat.number in self._seats:
                raise ValueError(f"{launch.seat.name} runs already")
            if launch.node is not None and launch.node not in self._node_names():
                raise ValueError(f"there is no node {launch.node!r}")
        self._paths.logs.mkdir(parents=True, exist_ok=True)
        for launch in launches:
            self._seats[launch.seat.number] = PlacedSeat(launch, time.monotonic())
        self._advance()

    def poll(self, timeout_s: float) -> list[Exit]:
        self._advance()
        if not self._exits:
            self._selector.select(timeout_s)
            self._advance()
        found, self._exits = self._exits, []
        self._exited.clear()
        return found

    def fileno(self) -> int:
        return self._selector.fileno()

    def running(self) -> list[int]:
        return sorted(self._seats)

    def waiting(self) -> list[int]:
        return []

    def stop(self, seats: Sequence[int]) -> None:
        for number in seats:
            placed = self._seats.get(number)
            if placed is None:
                continue
            if placed.link is None:
                self._end(number, -9)
            elif placed.kill_until_s is None:
                placed.kill_until_s = time.monotonic() + KILL_CONFIRM_S
                placed.link.send(StopCommand(seats=[number], how="kill"))

    def reattach(self) -> list[Seat]:
        return []

    def close(self) -> None:
        """Ends all agents at the same time, and returns when they have killed their processes."""
        for link in self._links.values():
            link.end()
        for link in self._links.values():
            link.wait()
        for number in list(self._seats):
            self._remove_seat(number)
        self._links.clear()
        self._selector.close()
        self._exited.close()

    # ---- hosts ----

    def agent_pids(self) -> dict[str, int]:
        """The processes on this machine that keep the agents, by host."""
        return {name: link.pid for name, link in self._links.items() if link.state != "lost"}

    def _node_names(self) -> set[str]:
        return set(self._hosts)

    def _advance(self) -> None:
        self._connect()
        for link in list(self._links.values()):
            link.flush()
            link.read()
            for report in link.reports:
                self._handle(link, report)
            link.reports.clear()
            if link.state == "lost":
                self._handle_lost(link)
            elif link.state == "ready":
                self._check_platform(link)
        self._place()
        self._give_up_waiting()

    def _connect(self) -> None:
        """Start the agents of hosts that have none, if a seat needs them and it is time."""
        waiting = any(placed.link is None for placed in self._seats.values())
        starting = sum(link.state == "starting" for link in self._links.values())
        for name, retry in self._retries.items():
            due = waiting and name not in self._links and time.monotonic() >= retry.at_s
            if due and starting < MAX_STARTING and self._failure is None:
                starting += 1
                try:
                    self._links[name] = HostLink(self._hosts[name], self._selector)
                except ShoalError as failure:
                    self._failure = failure

    def _handle_lost(self, link: HostLink) -> None:
        name = link.host.name
        del self._links[name]
        self._retries[name].postpone()
        failure, others_go_on = link.failure, self._host_use.may_miss(name)
        if failure is None or failure.code == UNREACHABLE or others_go_on:
            self._host_use.lose(name)
        if failure is not None and not (self._all_were_ready or others_go_on):
            self._failure = failure
        self._end_seats_of(link)

    def _end_seats_of(self, link: HostLink) -> None:
        words = f" ({link.last_words})" if link.last_words else ""
        for number, placed in list(self._seats.items()):
            if placed.link is link:
                self._end(number, None, reason=f"the loss of host {link.host.name}{words}")

    def _check_platform(self, link: HostLink) -> None:
        self._reference = self._reference or (link.host.name, link.platform)
        difference = None if link.ended else self._difference(link)
        if difference and self._all_were_ready:
            link.end()  # it came back as another machine: the others go on
        else:
            self._failure = self._failure or difference
        if difference is None and not link.ended:
            self._host_use.find(link.host.name)
        self._all_were_ready = self._all_were_ready or all(
            name in self._links and self._links[name].state == "ready" for name in self._demanded()
        )

    def _demanded(self) -> list[str]:
        return [name for name in self._hosts if not self._host_use.is_lost(name)]

    def _difference(self, link: HostLink) -> ShoalError | None:
        """Why this host would compute other bits than the first one."""
        assert self._reference is not None
        name = link.host.name
        difference = describe_difference(self._reference[1], link.platform)
        message = f"the hosts {self._reference[0]} and {name} differ: {difference}"
        if (there := link.platform.get("shoal", __version__)) != __version__:  # what is said between them may differ
            difference = message = f"Shoal {__version__} drives, and {name} has {there}"
        if not difference:
            return None
        fix = "Give all hosts the same versions, and use one kind of processor: others compute other bits."
        return error("SH654", message, where=f"host {name}", fix=fix)

    # ---- seats ----

    def _place(self) -> None:
        """Send waiting seats to hosts, each to the one with the most room for its size."""
        for number, placed in list(self._seats.items()):
            if placed.link is not None:
                continue
            if self._failure is not None:
                self._end(number, 1, start_error=self._failure)
            elif self._may_place() and (link := self._choose(placed)):
                placed.link = link
                self._host_use.take(link.host.name)
                launch = placed.launch
                self._note_placed(link, launch.seat)
                link.send(
                    LaunchCommand(
                        seat=launch.seat,
                        entry=launch.entry,
                        arguments=list(launch.arguments),
                        environment=dict(launch.environment) | {HOST_VARIABLE: self._told_name(link.host)},
                        reach=launch.reach,
                    )
                )

    @staticmethod
    def _told_name(host: AgentHost) -> str:
        """How errors of the user's code name the host; '' if it is a place in a queue, whose name says nothing."""
        return "" if host.queued else host.name

    def _note_placed(self, link: HostLink, seat: Seat) -> None:
        """Called before the seat is sent to its host."""

    def _may_place(self) -> bool:
        return self._all_were_ready

    def _gives_up(self, placed: PlacedSeat) -> bool:
        may_wait = self._all_were_ready or not self._demanded()
        return may_wait and time.monotonic() > placed.waiting_since_s + NO_HOST_S

    def _choose(self, placed: PlacedSeat) -> HostLink | None:
        """The host with the most room. None: wait for one."""
        usable = [link for link in self._links.values() if link.usable]
        usable = [link for link in usable if placed.launch.node in (None, link.host.name)]
        best = min(usable, key=lambda link: (self._fullness(link), link.host.name), default=None)
        ready = {link.host.name for link in self._links.values() if link.state == "ready"}
        others_may_return = any(not self._host_use.is_missing(name) for name in self._hosts.keys() - ready)
        is_early = time.monotonic() < placed.waiting_since_s + ROOM_WAIT_S
        return None if best and self._fullness(best) > 1 and others_may_return and is_early else best

    def _fullness(self, link: HostLink) -> float:
        """How full the host would be with one more process of any run; 1 is full."""
        return (self._host_use.processes(link.host.name) + 1) / max(1, link.host.node.room(1))

    def _give_up_waiting(self) -> None:
        now = time.monotonic()
        for number, placed in list(self._seats.items()):
            if placed.kill_until_s is not None and now > placed.kill_until_s:
                if placed.link is not None:
                    placed.link.doubtful = True
                self._end(number, None, reason="SIGKILL, which its host did not confirm")
            elif placed.link is None and self._gives_up(placed):
                message = f"no host could be reached for {NO_HOST_S:g} s"
                self._end(number, 1, start_error=error("SH651", message))

    def _handle(self, link: HostLink, report: PipeReport) -> None:
        if not isinstance(report, OutputReport | ExitedReport):
            return
        placed = self._seats.get(report.seat)
        if placed is None or placed.link is not link:
            return  # it counts as ended already
        seat = placed.launch.seat
        if isinstance(report, OutputReport):
            _append(self._paths.log(seat.number, seat.role), report.text + "\n")
            return
        _append(self._paths.error_log(seat.number, seat.role), report.errors)
        self._reset_retry(link)
        failed = error_from_fields(report.start_error) if report.start_error else None
        self._end(seat.number, report.code, start_error=failed)

    def _reset_retry(self, link: HostLink) -> None:
        self._retries[link.host.name].pause_s = MIN_RETRY_S

    def _end(self, number: int, code: int | None, *, reason: str = "", start_error: ShoalError | None = None) -> None:
        self._remove_seat(number)
        exit_of = Exit.with_code(number, code, start_error=start_error)
        self._exits.append(Exit(number, code, reason, start_error) if reason else exit_of)
        self._exited.notify()

    def _remove_seat(self, number: int) -> None:
        placed = self._seats.pop(number)
        if placed.link is not None:
            self._host_use.give_back(placed.link.host.name)


def _append(log: Path, text: str) -> None:
    """A full disk costs the lines, and not the run."""
    if text:
        with contextlib.suppress(OSError), log.open("a", encoding="utf-8", errors="replace") as file:
            file.write(text)
