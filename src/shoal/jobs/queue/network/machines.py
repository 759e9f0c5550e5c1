"""The machines of a queue: which are there, how many of their cores are used, and which worker gets which.

Any thread may call any method, except that the socket of a channel is read by those who opened it.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.jobs.queue.network.messages import OpenMessage
from shoal.net.errors import ProtocolError
from shoal.net.relay import break_off
from shoal.plan.queueing.shares import CoreCapacity

ROOM_CHECK_S = 1.0
"""How often one that waits for cores looks whether they are still wanted."""


@dataclass(eq=False)
class AgentChannel:
    """The way to one agent on a machine. `sock` is that of the machine, once it has connected."""

    run: str
    cores: int
    machine: Machine
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    sock: socket.socket | None = None


@dataclass(eq=False)
class Machine:
    """A machine that offers cores. `owner` names its token, `instance` the process there, `tell` sends it a message."""

    name: str
    owner: str
    cores: int
    memory_bytes: int
    tell: Callable[[OpenMessage], None]
    leave: Callable[[], None]
    instance: str = ""
    leaving: bool = False
    channels: set[AgentChannel] = field(default_factory=set)

    @property
    def free_cores(self) -> int:
        return self.cores - sum(channel.cores for channel in self.channels)


class MachinePool:
    def __init__(self) -> None:
        self._machines: dict[str, Machine] = {}
        self._channels: dict[str, AgentChannel] = {}
        self._wanted: Mapping[str, Sequence[str]] = {}
        self._changed = threading.Condition()
        self._has_changed = False
        self._closed = False

    # ---- for the daemon ----

    def capacity(self) -> CoreCapacity:
        with self._changed:
            here = [one for one in self._machines.values() if not one.leaving]
            return CoreCapacity(
                {one.name: one.cores for one in here},
                memory_bytes={one.name: one.memory_bytes for one in here if one.memory_bytes},  # 0: unknown
            )

    def has_changed(self) -> bool:
        """Whether machines came or went since the last call."""
        with self._changed:
            changed, self._has_changed = self._has_changed, False
            return changed

    def place(self, wanted: Mapping[str, Sequence[str]]) -> None:
        """By run: the machines of its workers, as the policy wants them."""
        with self._changed:
            self._wanted = wanted
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            machines = list(self._machines.values())
            self._changed.notify_all()
        for machine in machines:
            machine.leave()

    # ---- for machines ----

    def join(self, machine: Machine) -> bool:
        """Returns False if another machine has the name. One that comes again takes the place of its former self.
        ProtocolError if the queue ends."""
        with self._changed:
            if self._closed:
                raise ProtocolError("the queue ends")
            former = self._machines.get(machine.name)
            if former is not None and (former.owner, former.instance) != (machine.owner, machine.instance):
                return False
            self._machines[machine.name] = machine
            self._tell_changed()
        if former is not None:
            self._lose(former)
        return True

    def leaving(self, machine: Machine) -> None:
        with self._changed:
            machine.leaving = True
            self._tell_changed()

    def part(self, machine: Machine) -> None:
        """The machine is gone, and all that ran there."""
        with self._changed:
            if self._machines.get(machine.name) is machine:
                del self._machines[machine.name]
            self._tell_changed()
        self._lose(machine)

    def _lose(self, machine: Machine) -> None:
        machine.leave()
        with self._changed:
            sockets = [channel.sock for channel in machine.channels if channel.sock is not None]
            for channel in list(machine.channels):
                self._forget(channel)
            self._changed.notify_all()
        for sock in sockets:
            break_off(sock)

    def connect(self, channel_id: str, owner: str, sock: socket.socket) -> bool:
        """A machine has connected an agent. Returns False if nobody waits for it."""
        with self._changed:
            channel = self._channels.get(channel_id)
            if channel is None or channel.sock is not None or channel.machine.owner != owner:
                return False
            channel.sock = sock
            self._changed.notify_all()
            return True

    # ---- for runs ----

    def open(self, run: str, cores: int, *, is_wanted: Callable[[], bool]) -> AgentChannel | None:
        """Wait until a machine has the cores and has connected an agent. None if it is not wanted any more, or if the
        machine was lost on the way."""
        with self._changed:
            while (machine := self._choose(run, cores)) is None:
                if self._closed or not is_wanted():
                    return None
                self._changed.wait(ROOM_CHECK_S)
            channel = AgentChannel(run, cores, machine)
            machine.channels.add(channel)
            self._channels[channel.id] = channel
        machine.tell(OpenMessage(channel=channel.id))
        with self._changed:
            while channel.sock is None:
                if channel.id not in self._channels or self._closed or not is_wanted():
                    self._forget(channel)
                    return None
                self._changed.wait(ROOM_CHECK_S)
        return channel

    def release(self, channel: AgentChannel) -> None:
        """Its agent has ended."""
        with self._changed:
            self._forget(channel)
            self._changed.notify_all()

    def _choose(self, run: str, cores: int) -> Machine | None:
        """The machine that the policy wants, if it has room; else the one with most room. A run that has all machines
        for itself may share cores."""
        here = [one for one in self._machines.values() if not one.leaving]
        has = Counter(channel.machine.name for channel in self._channels.values() if channel.run == run)
        missing = Counter(self._wanted.get(run, ())) - has
        room = [one for one in here if one.free_cores >= cores]
        if not room and all(channel.run == run for channel in self._channels.values()):
            fits_nowhere = sum(one.cores // cores for one in here) < len(self._wanted.get(run, ()))
            room = here if fits_nowhere or all(one.cores < cores for one in here) else []
        return max(room, key=lambda one: (missing[one.name] > 0, one.free_cores, one.name), default=None)

    def _forget(self, channel: AgentChannel) -> None:
        channel.machine.channels.discard(channel)
        self._channels.pop(channel.id, None)

    def _tell_changed(self) -> None:
        self._has_changed = True
        self._changed.notify_all()
