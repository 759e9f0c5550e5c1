"""What members that meet in a new view go on from: their memory, if all parts of the newest state are in it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Holding:
    """What one member brings. `part` of so many `ways`, after `step` steps; None: nothing. `view` is the one in which
    the last of them counted: who makes the same step in two views may get other bits. `pending` is the view in which it
    has voted for one step more, which it could take if that counted there. `evaluated`: it knows what this step's
    evaluation found. `mirrors` is a part of which it has a copy, from the same step."""

    step: int | None = None
    part: int = 0
    ways: int = 0
    view: int = 0
    pending: int | None = None
    evaluated: bool = False
    mirrors: int | None = None


@dataclass(frozen=True)
class Origin:
    """They go on after `step` steps, the last of which counted in `view`. `sources`: for each part, the rank in whose
    memory it is; empty if a checkpoint counts, or the beginning. `teller` is the rank that knows all the rest. `lost`:
    so many steps must be made again."""

    step: int = 0
    sources: dict[int, int] = field(default_factory=dict)
    teller: int = 0
    lost: int = 0
    view: int = 0


def origin(holdings: Mapping[int, Holding], *, ways: int, saved: int | None) -> Origin:
    """From what each rank brings, and the step of the newest checkpoint."""
    best = max(((one.step, one.view) for one in holdings.values() if one.step is not None), default=None)
    if best is None:
        return Origin(saved or 0)
    step, view = best
    able = {rank: one for rank, one in sorted(holdings.items()) if one.ways == ways and can_reach(one, step, view)}
    sources: dict[int, int] = {}
    for rank, one in able.items():
        sources.setdefault(one.part, rank)
    for rank, one in able.items():
        if one.mirrors is not None:
            sources.setdefault(one.mirrors, rank)
    if len(sources) < ways or (saved or 0) > step:
        return Origin(saved or 0, lost=max(step - (saved or 0), 0))
    there = [rank for rank, one in able.items() if one.step == step]
    teller = min(there, key=lambda rank: (not holdings[rank].evaluated, rank))
    return Origin(step, sources, teller, view=view)


def can_reach(one: Holding, step: int, view: int) -> bool:
    """The first step of all is made again instead: before it, optimizers have nothing that others could be told of."""
    return (one.step, one.view) == (step, view) or (one.pending == view and one.step == step - 1 > 0)


@dataclass(frozen=True)
class Move:
    """A part goes from the memory of one rank to another's."""

    part: int
    source: int
    target: int


def moves(found: Origin, holdings: Mapping[int, Holding], *, ways: int) -> list[Move]:
    """For every rank that does not hold the part of its place itself, in an order that all follow."""

    def stays(rank: int, one: Holding) -> bool:
        return one.ways == ways and one.part == rank % ways and can_reach(one, found.step, found.view)

    return [
        Move(rank % ways, found.sources[rank % ways], rank)
        for rank, one in sorted(holdings.items())
        if found.sources and not stays(rank, one)
    ]
