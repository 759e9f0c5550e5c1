"""Statistics of a chunk table: bytes per server, and bytes that the next table moves."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from shoal.spec.chunk_table import ChunkTable


@dataclass(frozen=True)
class ServerPlacementStats:
    """Bytes of one server: as primary, as backup, and still being sent to it."""

    primary_bytes: int = 0
    backup_bytes: int = 0
    filling_bytes: int = 0


def placement_stats(chunk_table: ChunkTable) -> dict[int, ServerPlacementStats]:
    """The statistics of every seat that holds or receives chunks."""
    primary: Counter[int] = Counter()
    backup: Counter[int] = Counter()
    filling: Counter[int] = Counter()
    for size, chain, coming in zip(_chunk_sizes(chunk_table), chunk_table.chains, chunk_table.filling, strict=True):
        primary[chain[0]] += size
        backup.update(dict.fromkeys(chain[1:], size))
        filling.update(dict.fromkeys(coming, size))
    return {
        seat: ServerPlacementStats(primary[seat], backup[seat], filling[seat])
        for seat in sorted({*primary, *backup, *filling})
    }


def moved_bytes(before: ChunkTable, after: ChunkTable) -> int:
    """Bytes to send to servers that neither had them nor were already receiving them."""
    held = [{*chain, *coming} for chain, coming in zip(before.chains, before.filling, strict=True)]
    return sum(
        size * len(set(coming) - had)
        for size, coming, had in zip(_chunk_sizes(after), after.filling, held, strict=True)
    )


def _chunk_sizes(chunk_table: ChunkTable) -> list[int]:
    return [stop - start for start, stop in zip(chunk_table.cuts, chunk_table.cuts[1:], strict=False)]
