"""Which servers hold which chunks: facts go in, numbered chunk tables come out. No I/O.

Rules that keep all parameters when servers die:
- a server is in a chain only if it holds the full chunk, and is removed only when enough other servers hold it;
- a server holds a chunk when the last server of the chain has reported so under the newest table. From then on that
  last server acknowledges nothing without the new server, so the new server may become primary;
- reports under an older table are ignored, and are repeated under the newer one;
- one server per chunk is filled at a time, so that the server that fills it holds the chunk;
- the newest table of an earlier driver is valid until this driver has decided its first; then only its number matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from shoal.plan.chunk_assignment import ChunkHolders, assign_by_consistent_hashing, assign_chunks
from shoal.spec.chunk_table import ChunkTable
from shoal.spec.view import Address

PlacementMethod = Literal["table", "ring"]

TAKEOVER_NUMBER_GAP = 1000
"""A new driver skips this many table numbers, because the earlier driver may have sent tables that no living process
has seen."""


@dataclass(frozen=True)
class ChunksLost:
    """A chunk has no holder left: the run must return to a checkpoint."""

    why: str


class ChunkPlacement:
    """Belongs to the thread that drives the run. `servers` is the wanted number; every chunk gets `backups` backups."""

    def __init__(self, *, servers: int, backups: int, method: PlacementMethod = "table") -> None:
        self.wanted_servers = servers
        self.backups = backups
        self.method = method
        self.chunk_table: ChunkTable | None = None
        """The newest table."""
        self._table_number = 0
        self._decided_here = False
        self._boundaries: list[int] = []
        self._servers: dict[int, Address] = {}
        self._expected: set[int] = set()
        self._leaving: set[int] = set()
        self._filled_links: set[tuple[int, int]] = set()
        self._target: ChunkHolders = []
        self._target_seats: list[int] = []
        self._changed = False

    # ---- facts ----

    def expect(self, seat: int) -> None:
        """A server is being started in this seat, or lives and will connect."""
        if seat not in self._servers:
            self._expected.add(seat)

    def arrived(self, seat: int, address: Address) -> None:
        """A server connected or reconnected."""
        if seat not in self._servers and len(self._staying()) >= self.wanted_servers and not self._in_table(seat):
            self._leaving.add(seat)  # scaled down while the server was starting
        self._changed = self._changed or self._servers.get(seat) != address
        self._servers[seat] = address
        self._expected.discard(seat)

    def gone(self, seat: int) -> None:
        """The server's process ended, or it was evicted. Its seat number is never used again."""
        self._servers.pop(seat, None)
        self._expected.discard(seat)
        self._leaving.discard(seat)
        self._changed = True

    def drain(self, seat: int, *, replace: bool = False) -> None:
        """Let the server leave, after other servers have received the chunks that it holds."""
        if seat in self._servers and seat not in self._leaving:
            self._leaving.add(seat)
            self.wanted_servers = self.wanted_servers if replace else max(self.wanted_servers - 1, 1)
            self._changed = True

    def scale(self, servers: int) -> list[int]:
        """Change the number of servers. Returns the seats that must leave: the newest."""
        self.wanted_servers = servers
        going = self._staying()[servers:]
        self._leaving.update(going)
        self._changed = True
        return going

    def set_boundaries(self, boundaries: Sequence[int]) -> None:
        """The chunk boundaries, as a worker reports them. All workers report the same; only the first call counts."""
        if not self._boundaries:
            self._boundaries, self._changed = list(boundaries), True

    def observe_table(self, chunk_table: ChunkTable) -> None:
        """The newest table that a connecting process has seen. Servers and workers report it to a new driver before it
        decides. Fillings of an earlier driver start again, because its reports are lost."""
        if chunk_table.number <= self._table_number:
            return
        self._changed = True
        self._table_number = chunk_table.number
        if not self._decided_here:
            self.chunk_table, self._boundaries, self._target_seats = chunk_table, chunk_table.cuts, []
            parts = zip(chunk_table.chains, chunk_table.filling, strict=True)
            self._target = [[*chain[:1], *filling, *chain[1:]] for chain, filling in parts]

    def filled(self, by: int, seat: int, table_number: int) -> None:
        """Under this table, `seat` has received all its chunks from `by`."""
        if self._decided_here and self.chunk_table and table_number == self.chunk_table.number:
            self._filled_links.add((by, seat))
            self._changed = True

    def reset(self) -> None:
        """The run returns to a checkpoint: the contents of all servers are void, so all servers are equally empty."""
        self.chunk_table, self._decided_here, self._changed = None, True, True
        self._target, self._target_seats = [], []
        self._filled_links.clear()

    # ---- decisions ----

    def missing_servers(self) -> int:
        """Number of servers to start."""
        return max(self.wanted_servers - len(self._staying()) - len(self._expected), 0)

    def releasable_seats(self) -> list[int]:
        """Leaving servers that no longer hold anything needed."""
        return sorted(seat for seat in self._leaving if not self._in_table(seat))

    def decide(self) -> ChunkTable | ChunksLost | None:
        """The next table, if a new one is needed. Call after every fact, and periodically."""
        if not self._changed or not self._ready():
            return None
        held = self._live_holders()
        if self.chunk_table and not all(held):
            return ChunksLost(f"{sum(not order for order in held)} of {len(held)} chunks were on servers that are gone")
        self._changed = False
        self._choose_target(held)
        ways = [self._chain_and_filling(*orders) for orders in zip(held, self._target, strict=True)]
        chains, filling = [chain for chain, _ in ways], [filling for _, filling in ways]
        addresses = {s: self._servers[s] for s in sorted({s for way in ways for part in way for s in part})}
        if self._is_current(chains, filling, addresses):
            return None
        self._table_number += 1 if self._decided_here else 1 + TAKEOVER_NUMBER_GAP * (self.chunk_table is not None)
        self._decided_here = True
        self._filled_links.clear()
        self.chunk_table = ChunkTable(
            number=self._table_number, cuts=self._boundaries, chains=chains, filling=filling, addresses=addresses
        )
        return self.chunk_table

    def _ready(self) -> bool:
        """The first table waits for all wanted servers; after a takeover, for all living servers of the last table."""
        if self.chunk_table is None:
            return bool(self._boundaries) and len(self._staying()) >= self.wanted_servers
        return self._decided_here or not self._expected & self.chunk_table.addresses.keys()

    def _is_current(self, chains: ChunkHolders, filling: ChunkHolders, addresses: dict[int, Address]) -> bool:
        """Whether the newest table already says this, comes from this driver, and is the newest that any process has
        seen."""
        table = self.chunk_table
        if table is None or not self._decided_here or table.number < self._table_number:
            return False
        return (table.chains, table.filling, table.addresses) == (chains, filling, addresses)

    def _staying(self) -> list[int]:
        return sorted(seat for seat in self._servers if seat not in self._leaving)

    def _in_table(self, seat: int) -> bool:
        """Whether the seat is in the newest table."""
        return self.chunk_table is not None and seat in self.chunk_table.addresses

    def _live_holders(self) -> ChunkHolders:
        """For each chunk the living seats that hold it, in the order of the newest table."""
        if self.chunk_table is None:
            return [[] for _ in self._boundaries[1:]]
        return [
            [
                *(seat for seat in chain if seat in self._servers),
                *(seat for seat in filling if seat in self._servers and (chain[-1], seat) in self._filled_links),
            ]
            for chain, filling in zip(self.chunk_table.chains, self.chunk_table.filling, strict=True)
        ]

    def _choose_target(self, held: ChunkHolders) -> None:
        """Choose a new target if the set of servers has changed. Fillings in progress continue."""
        seats = self._staying() or sorted(self._servers)
        if seats == self._target_seats:
            return
        copies = min(self.backups + 1, len(seats))
        if self.method == "ring":
            self._target = assign_by_consistent_hashing(len(held), seats, copies=copies)
        else:
            wish = self._target or held
            wish = [list(dict.fromkeys(old + now)) for old, now in zip(wish, held, strict=True)]
            sizes = [stop - start for start, stop in pairwise(self._boundaries)]
            self._target = assign_chunks(sizes, seats, copies=copies, preferred=wish, held=held)
        self._target_seats = seats

    def _chain_and_filling(self, held: list[int], target: list[int]) -> tuple[list[int], list[int]]:
        """Chain and filling of a chunk on its way to the target."""
        there = [seat for seat in target if seat in held]
        filling = [seat for seat in target if seat not in held]
        enough = min(self.backups + 1, self.wanted_servers)
        others = [seat for seat in held if seat not in target][: max(enough - len(there), 0)]
        if not held or not (filling or others):  # if no server holds anything, all are in sync
            return target, []
        chain = there + others
        if target[0] not in held:
            chain.sort(key=held.index)  # the present primary stays until the target's primary has the chunk
        return chain, filling[:1]
