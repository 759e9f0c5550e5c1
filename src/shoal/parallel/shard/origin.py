"""What members that meet in a new view go on from: their memory, if all parts of the newest state are in it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Holding:
    """What one member brings. `part` of so many `ways`, after `step` steps; None: nothing. `pending`: it could take one
    step more, if another has. `evaluated`: it knows what this step's evaluation found. `mirrors` is a part of which it
    has a copy, from the same step."""

    step: int | None = None
    part: int = 0
    ways: int = 0
    pending: bool = False
    evaluated: bool = False
    mirrors: int | None = None


@dataclass(frozen=True)
class Origin:
    """They go on after `step` steps. `sources`: for each part, the rank in whose memory it is; empty if a checkpoint
    counts, or the beginning. `teller` is the rank that knows all the rest. `lost`: so many steps must be made again.
    """

    step: int = 0
    sources: dict[int, int] = field(default_factory=dict)
    teller: int = 0
    lost: int = 0


def origin(holdings: Mapping[int, Holding], *, ways: int, saved: int | None) -> Origin:
    """From what each rank brings, and the step of the newest checkpoint."""
    best = max((one.step for one in holdings.values() if one.step is not None), default=None)
    if best is None:
        return Origin(saved or 0)
    able = {rank: one for rank, one in sorted(holdings.items()) if one.ways == ways and can_reach(one, best)}
    sources: dict[int, int] = {}
    for rank, one in able.items():
        sources.setdefault(one.part, rank)
    for rank, one in able.items():
        if one.mirrors is not None:
            sources.setdefault(one.mirrors, rank)
    if len(sources) < ways or (saved or 0) > best:
        return Origin(saved or 0, lost=max(best - (saved or 0), 0))
    there = [rank for rank, one in able.items() if one.step == best]
    return Origin(best, sources, min(there, key=lambda rank: (not holdings[rank].evaluated, rank)))


def can_reach(one: Holding, step: int) -> bool:
    """The first step of all is made again instead: before it, optimizers have nothing that others could be told of."""
    return one.step == step or (one.pending and one.step == step - 1 > 0)


@dataclass(frozen=True)
class Move:
    """A part goes from the memory of one rank to another's."""

    part: int
    source: int
    target: int


def moves(found: Origin, holdings: Mapping[int, Holding], *, ways: int) -> list[Move]:
    """For every rank that does not hold the part of its place itself, in an order that all follow."""
    return [
        Move(rank % ways, found.sources[rank % ways], rank)
        for rank, one in sorted(holdings.items())
        if found.sources and not (can_reach(one, found.step) and one.ways == ways and one.part == rank % ways)
    ]
