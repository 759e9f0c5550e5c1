"""The servers of one run, started, watched and replaced. Who holds what is decided by `plan` and told here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

from shoal.events import Stream
from shoal.fleet.control import Control, Said
from shoal.fleet.engine import Exit
from shoal.fleet.engines.local import LocalEngine
from shoal.fleet.survivors import Survivor
from shoal.jobs.voice import CALL_BACK_S, Voice
from shoal.plan.holdings import holdings, moved_bytes
from shoal.plan.placement import Lost, Placement
from shoal.plan.suspicion import Suspicion
from shoal.spec.job import ServerSync
from shoal.spec.paths import RunPaths
from shoal.spec.table import Table, pieces
from shoal.spec.view import Address, Seat

SERVER = "shoal.train.server"
LOOK_S = 0.1
SERVED_EVERY_S = 3.0


class Harbour:
    """Belongs to the thread that drives. `tend` after anything became readable, and now and then.

    A server that dies before it holds anything is tried again, `restarts` times in a row; then the run goes on
    with the servers that it has, if it has any.
    """

    def __init__(
        self,
        sync: ServerSync,
        paths: RunPaths,
        engine: LocalEngine,
        control: Control,
        stream: Stream,
        *,
        new_seat: Callable[[], int],
        restarts: int,
        entry: str = "",
    ) -> None:
        self.seats: set[int] = set()
        self.table: Table | None = None
        self._placement = Placement(servers=sync.servers, backups=sync.backups, how=sync.placement)
        self._paths = paths
        self._engine = engine
        self._control = control
        self._stream = stream
        self._restarts = self._restarts_left = restarts
        self._entry = entry or SERVER
        self._new_seat = new_seat
        self._suspicion = Suspicion()
        self._voices: dict[int, Voice] = {}
        self._callers: dict[int, int] = {}
        self._orphans: dict[int, float] = {}  # seats that should call back, and until when
        self._out: dict[int, str] = {}  # seats that were put out, and why
        self._released: set[int] = set()  # seats that leave as they were asked to
        self._proven: set[int] = set()  # seats that held something
        self._fallen: set[int] = set()  # seats that died since the last table
        self._news: list[str] = []  # what happened since the last table
        self._told: dict[int, Mapping[str, Any]] = {}  # what was last told of each server
        self._newest = self._void = 0  # numbers of tables: the newest, and the newest of those whose content is lost
        self._look_at = self._tell_at = 0.0

    @property
    def wanted(self) -> int:
        return self._placement.wanted

    @property
    def here(self) -> list[int]:
        """The seats of those who have called."""
        return sorted(self._voices)

    @property
    def callers(self) -> list[int]:
        """Those of servers that are heard."""
        return [voice.caller for voice in self._voices.values() if voice.lost_s is None]

    @property
    def processes(self) -> dict[str, int]:
        """Process ids of those who have called, by name."""
        return {_name(seat): voice.pid for seat, voice in list(self._voices.items())}

    # ---- facts ----

    def start(self, survivors: Iterable[Survivor]) -> None:
        """Take over the servers that outlived an earlier driver; the rest is started as it is missed."""
        self._tell_wanted("")
        for one in survivors:
            seat = one.seat.number
            self._engine.adopt(seat, one.pid)
            self._expect(seat)
            self._orphans[seat] = time.monotonic() + CALL_BACK_S

    def welcome(self, said: Said) -> None:
        """A server calls. Who makes no sense, or sits in no seat of ours, is not let in."""
        try:
            seat, pid, host = int(said.fields["seat"]), int(said.fields["pid"]), str(said.fields["host"])
            address = Address.model_validate(said.fields["address"])
            table = said.fields.get("table")
            known = None if table is None else Table.model_validate(table)
        except (KeyError, TypeError, ValueError, OverflowError):  # pydantic's error is a ValueError
            self._control.drop(said.caller)
            return
        if seat not in self.seats or seat in self._out:
            self._control.drop(said.caller)
            return
        self._hang_up(seat)
        if seat not in self._voices:
            self._stream.emit("server_started", server=_name(seat), pid=pid, host=host)
            self._news.append(f"{_name(seat)} arrived")
        self._voices[seat] = Voice(said.caller, pid, host, local=True)
        self._callers[said.caller] = seat
        self._orphans.pop(seat, None)
        self.known(known)
        self._placement.arrived(seat, address)
        self._control.send(said.caller, "welcome", seat=seat, run=self._paths.name)
        self.show(said.caller)

    def known(self, table: Table | None) -> None:
        """The newest table that a caller has seen; it may be an earlier driver's."""
        if table is not None:
            self._newest = max(self._newest, table.number)
            self._placement.known(table)

    def is_void(self, table: Table | None) -> bool:
        """Is what went with this table lost?"""
        return table is not None and table.number <= self._void

    def knows(self, caller: int) -> bool:
        return caller in self._callers

    def hear(self, said: Said) -> None:
        """What a server says. What makes no sense costs it its connection."""
        seat = self._callers[said.caller]
        try:
            if said.kind == "beat":
                self._voices[seat].beat = said.fields
            elif said.kind == "filled":
                filled = int(said.fields["seat"])
                self._placement.filled(seat, filled, int(said.fields["table"]))
                self._news.append(f"{_name(filled)} is filled")
            elif said.kind == "lost":
                self._hang_up(seat)
        except (KeyError, TypeError, ValueError, OverflowError):
            self._control.drop(said.caller)
            self._hang_up(seat)

    def sized(self, cuts: Any) -> None:
        """A worker knows the model. ValueError or TypeError if that is nonsense."""
        known = [int(cut) for cut in cuts]
        if len(known) < 2 or any(a >= b for a, b in pairwise(known)):
            raise ValueError("cuts that do not ascend")
        self._placement.sized(known)

    def ended(self, one: Exit) -> str:
        """A server's process is gone. Returns why the run cannot go on, if it cannot."""
        seat = one.seat
        why = self._out.pop(seat, "") or one.reason
        self._tell_served([seat])
        self._hang_up(seat)
        self._voices.pop(seat, None)
        self._orphans.pop(seat, None)
        self.seats.discard(seat)
        self._placement.gone(seat)
        if seat in self._released:
            self._stream.emit("server_left", server=_name(seat))
            return ""
        self._stream.emit("server_died", server=_name(seat), reason=why)
        self._fallen.add(seat)
        self._news.append(f"{_name(seat)} is gone")
        return "" if seat in self._proven else self._failed_to_start(seat, why)

    def scale(self, servers: int, *, why: str = "scaled") -> None:
        self._restarts_left = self._restarts
        self._placement.scale(servers)
        self._news.append(f"{servers} servers are wanted")
        self._tell_wanted(why)

    def drain(self, seat: int) -> None:
        """Let it go when others have what it holds."""
        if seat in self._voices:
            self._placement.leaves(seat)
            self._news.append(f"{_name(seat)} leaves")
            self._tell_wanted(f"{_name(seat)} is drained")

    # ---- acts ----

    def tend(self, now_s: float, workers: Iterable[int]) -> str:
        """Look for those who hang, start who is missing, tell servers and workers (these callers) of the next table.

        Returns why everything is lost, if it is: who trains must go back to a checkpoint.
        """
        if now_s >= self._look_at:
            self._look_at = now_s + LOOK_S
            self._suspect(now_s)
        if now_s >= self._tell_at:
            self._tell_at = now_s + SERVED_EVERY_S
            self._tell_served(self._voices)
        self._start(self._placement.missing())
        self._release(self._placement.dispensable())
        decided = self._placement.decide()
        if isinstance(decided, Lost):
            return self._lose(decided.why)
        if decided is not None:
            self._publish(decided, workers)
        return ""

    def show(self, caller: int) -> None:
        """The newest table, to one who comes."""
        if self.table is not None:
            self._control.publish_table(self.table, [caller])

    def conclude(self) -> None:
        """The run is over: tell what was not told yet."""
        self._tell_served(self._voices)

    def _expect(self, seat: int) -> None:
        self.seats.add(seat)
        self._placement.expect(seat)

    def _start(self, number: int) -> None:
        seats = [Seat(number=self._new_seat(), role="server") for _ in range(number)]
        for seat in seats:
            self._expect(seat.number)
        self._engine.start(seats, self._entry, ["--run", str(self._paths.root)])

    def _release(self, seats: Iterable[int]) -> None:
        going = [seat for seat in seats if seat in self.seats and seat not in self._released]
        self._released.update(going)
        self._engine.stop(going)

    def _publish(self, table: Table, workers: Iterable[int]) -> None:
        old, self.table, self._newest = self.table, table, table.number
        self._control.publish_table(table, [*self.callers, *workers])
        self._stream.emit("table", why=", ".join(dict.fromkeys(self._news)), **_told(old, table, self._fallen))
        self._news.clear()
        self._fallen.clear()
        proven = {seat for chain in table.chains for seat in chain}
        if proven - self._proven:
            self._proven |= proven
            self._restarts_left = self._restarts

    def _lose(self, why: str) -> str:
        self._stream.emit("servers_lost", reason=why)
        self._placement.forget()
        self.table, self._void = None, self._newest
        return why

    def _failed_to_start(self, seat: int, why: str) -> str:
        self._restarts_left -= 1
        if self._restarts_left >= 0:
            return ""
        able = self.seats & self._proven
        failure = f"{_name(seat)} ended by {why} before it could serve; no restarts left"
        if not able:
            return failure
        self.scale(len(able), why=failure)
        return ""

    def _suspect(self, now_s: float) -> None:
        """Servers wait for workers and for each other: whether they live counts, not how long they take."""
        for seat in [s for s, until in self._orphans.items() if now_s > until]:
            del self._orphans[seat]
            self._put_out(seat, "it outlived its driver and did not call back")
        going = self._released | self._out.keys()
        signs = [voice.sign(seat, self._control) for seat, voice in self._voices.items() if seat not in going]
        for verdict in self._suspicion.look(now_s, [replace(sign, since_s=0.0) for sign in signs]):
            self._put_out(verdict.seat, verdict.why)

    def _put_out(self, seat: int, why: str) -> None:
        voice = self._voices.get(seat)
        self._stream.emit("put_out", server=_name(seat), host=voice.host if voice else "", reason=why)
        self._out[seat] = why
        self._engine.stop([seat])

    def _hang_up(self, seat: int) -> None:
        """Its connection is gone, or replaced by another."""
        voice = self._voices.get(seat)
        if voice is not None and self._callers.pop(voice.caller, None) is not None:
            voice.lost_s = time.monotonic()
            self._control.drop(voice.caller)

    def _tell_wanted(self, why: str) -> None:
        self._stream.emit("servers_wanted", number=self.wanted, why=why)

    def _tell_served(self, seats: Iterable[int]) -> None:
        for seat in [seat for seat in seats if seat in self._voices]:
            served = self._voices[seat].beat.get("served")
            if isinstance(served, Mapping) and served and served != self._told.get(seat):
                self._told[seat] = served
                self._stream.emit("served", server=_name(seat), served=_numbers(served))


def _name(seat: int) -> str:
    return f"server-{seat}"


def _numbers(served: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): value for name, value in served.items() if isinstance(value, int | float)}


def _told(old: Table | None, new: Table, fallen: set[int]) -> dict[str, Any]:
    """`copies`: that there are at least of every chunk. `failovers`: servers that died as somebody's primary."""
    same = old is not None and old.cuts == new.cuts
    return {
        "number": new.number,
        "servers": {_name(seat): asdict(held) for seat, held in holdings(new).items()},
        "chunks": len(new.chains),
        "pieces": len(pieces(new)),
        "copies": min(len(chain) for chain in new.chains),
        "moved_bytes": moved_bytes(old, new) if old is not None and same else 0,
        "failovers": len(fallen & {chain[0] for chain in old.chains}) if old is not None else 0,
    }
