"""Which servers hold which chunks: facts go in, numbered tables come out; nothing is done here.

Rules that lose nothing, whatever dies:
- only a seat that holds all of a chunk stands in its chain, and is let go only when enough others do;
- a seat holds a chunk when the last of the chain has said so under the newest table. Whoever says so acknowledges
  nothing more without the seat that it filled, so that the seat may lead from then on;
- what was said under an older table does not count: it is said again under the newer one;
- of a chunk one seat is filled at a time, so that who fills holds it;
- an earlier driver's newest table counts until this one has decided its first; after that only its number does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from shoal.plan.spread import Orders, ring, spread
from shoal.spec.table import Table
from shoal.spec.view import Address

How = Literal["table", "ring"]

LEAP = 1000
"""So much higher a new driver begins to number. The one before may have sent tables that nobody alive has seen."""


@dataclass(frozen=True)
class Lost:
    """Some chunk has no holder left: the run must go back to a checkpoint."""

    why: str


class Placement:
    """Belongs to the thread that drives the run. `servers` are wanted; every chunk is to have so many `backups`."""

    def __init__(self, *, servers: int, backups: int, how: How = "table") -> None:
        self.wanted = servers
        self.backups = backups
        self.how = how
        self.table: Table | None = None
        """The newest."""
        self._number = 0
        self._own = False
        self._cuts: list[int] = []
        self._servers: dict[int, Address] = {}
        self._expected: set[int] = set()
        self._leaving: set[int] = set()
        self._filled: set[tuple[int, int]] = set()
        self._target: Orders = []
        self._aimed_at: list[int] = []
        self._news = False

    # ---- facts ----

    def expect(self, seat: int) -> None:
        """This seat is being filled, or its server lives and will call."""
        if seat not in self._servers:
            self._expected.add(seat)

    def arrived(self, seat: int, address: Address) -> None:
        """A server took its seat, or called again."""
        if seat not in self._servers and len(self._staying()) >= self.wanted and not self._named(seat):
            self._leaving.add(seat)  # fewer are wanted than when it was started
        self._news = self._news or self._servers.get(seat) != address
        self._servers[seat] = address
        self._expected.discard(seat)

    def gone(self, seat: int) -> None:
        """Its process ended, or it was put out. It never comes back under this number."""
        self._servers.pop(seat, None)
        self._expected.discard(seat)
        self._leaving.discard(seat)
        self._news = True

    def leaves(self, seat: int, *, replace: bool = False) -> None:
        """It asks to go, or is asked to: others get what it holds before it is dispensable."""
        if seat in self._servers and seat not in self._leaving:
            self._leaving.add(seat)
            self.wanted = self.wanted if replace else max(self.wanted - 1, 1)
            self._news = True

    def scale(self, servers: int) -> list[int]:
        """Another number of servers. The seats that have to go for it: the newest."""
        self.wanted = servers
        going = self._staying()[servers:]
        self._leaving.update(going)
        self._news = True
        return going

    def sized(self, cuts: Sequence[int]) -> None:
        """A worker knows the model. All say the same; the first counts."""
        if not self._cuts:
            self._cuts, self._news = list(cuts), True

    def known(self, table: Table) -> None:
        """The newest table that one who calls has seen. Let servers and workers tell it to a new driver before it
        decides. What an earlier driver had filled is begun anew, for nobody knows what it heard."""
        if table.number <= self._number:
            return
        self._news = True
        self._number = table.number
        if not self._own:
            self.table, self._cuts, self._aimed_at = table, table.cuts, []
            parts = zip(table.chains, table.filling, strict=True)
            self._target = [[*chain[:1], *filling, *chain[1:]] for chain, filling in parts]

    def filled(self, by: int, seat: int, table: int) -> None:
        """Under this table, `seat` has all chunks that it was to get from `by`."""
        if self._own and self.table and table == self.table.number:
            self._filled.add((by, seat))
            self._news = True

    def forget(self) -> None:
        """What servers hold is void, the run goes back to a checkpoint. All are empty then, and so all are in sync."""
        self.table, self._own, self._news = None, True, True
        self._target, self._aimed_at = [], []
        self._filled.clear()

    # ---- decisions ----

    def missing(self) -> int:
        """So many servers are to be started."""
        return max(self.wanted - len(self._staying()) - len(self._expected), 0)

    def dispensable(self) -> list[int]:
        """Those that leave and hold nothing that is needed any more."""
        return sorted(seat for seat in self._leaving if not self._named(seat))

    def decide(self) -> Table | Lost | None:
        """The next table, if there must be another one. Called after every fact, and now and then."""
        if not self._news or not self._ready():
            return None
        held = self._held()
        if self.table and not all(held):
            return Lost(f"{sum(not order for order in held)} of {len(held)} chunks were on servers that are gone")
        self._news = False
        self._aim(held)
        ways = [self._way(*orders) for orders in zip(held, self._target, strict=True)]
        chains, filling = [chain for chain, _ in ways], [filling for _, filling in ways]
        addresses = {s: self._servers[s] for s in sorted({s for way in ways for part in way for s in part})}
        if self._stands(chains, filling, addresses):
            return None
        self._number += 1 if self._own else 1 + LEAP * (self.table is not None)
        self._own = True
        self._filled.clear()
        self.table = Table(number=self._number, cuts=self._cuts, chains=chains, filling=filling, addresses=addresses)
        return self.table

    def _ready(self) -> bool:
        """The first table waits for all that are wanted; that of another driver, for all whom it names and who live."""
        if self.table is None:
            return bool(self._cuts) and len(self._staying()) >= self.wanted
        return self._own or not self._expected & self.table.addresses.keys()

    def _stands(self, chains: Orders, filling: Orders, addresses: dict[int, Address]) -> bool:
        """Does the newest table say this already, and is it ours and the newest that anybody has seen?"""
        table = self.table
        if table is None or not self._own or table.number < self._number:
            return False
        return (table.chains, table.filling, table.addresses) == (chains, filling, addresses)

    def _staying(self) -> list[int]:
        return sorted(seat for seat in self._servers if seat not in self._leaving)

    def _named(self, seat: int) -> bool:
        """Does it stand in the newest table?"""
        return self.table is not None and seat in self.table.addresses

    def _held(self) -> Orders:
        """Per chunk the living seats that hold it, in the order of the newest table."""
        if self.table is None:
            return [[] for _ in self._cuts[1:]]
        return [
            [
                *(seat for seat in chain if seat in self._servers),
                *(seat for seat in filling if seat in self._servers and (chain[-1], seat) in self._filled),
            ]
            for chain, filling in zip(self.table.chains, self.table.filling, strict=True)
        ]

    def _aim(self, held: Orders) -> None:
        """Another target, if there are others to hold things than when it was chosen. What moves already, goes on."""
        seats = self._staying() or sorted(self._servers)
        if seats == self._aimed_at:
            return
        copies = min(self.backups + 1, len(seats))
        if self.how == "ring":
            self._target = ring(len(held), seats, copies=copies)
        else:
            wish = self._target or held
            wish = [list(dict.fromkeys(old + now)) for old, now in zip(wish, held, strict=True)]
            sizes = [stop - start for start, stop in pairwise(self._cuts)]
            self._target = spread(sizes, seats, copies=copies, wish=wish, held=held)
        self._aimed_at = seats

    def _way(self, held: list[int], target: list[int]) -> tuple[list[int], list[int]]:
        """Chain and filling of a chunk on its way to the target."""
        there = [seat for seat in target if seat in held]
        filling = [seat for seat in target if seat not in held]
        enough = min(self.backups + 1, self.wanted)
        others = [seat for seat in held if seat not in target][: max(enough - len(there), 0)]
        if not held or not (filling or others):  # where nobody holds anything, all are in sync
            return target, []
        chain = there + others
        if target[0] not in held:
            chain.sort(key=held.index)  # who leads goes on until the target's primary can
        return chain, filling[:1]
