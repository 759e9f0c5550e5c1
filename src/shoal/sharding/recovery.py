"""What members that meet in a new view go on from: their memory, if all parts of the newest state are in it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class HeldShard:
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
class RecoveryPoint:
    """They go on after `step` steps, the last of which counted in `view`. `sources`: for each part, the rank in whose
    memory it is; empty if a checkpoint counts, or the beginning. `teller` is the rank that knows all the rest. `lost`:
    so many steps must be made again."""

    step: int = 0
    sources: dict[int, int] = field(default_factory=dict)
    metadata_rank: int = 0
    lost_steps: int = 0
    view: int = 0


def recovery_point(
    held_shards: Mapping[int, HeldShard], *, replica_size: int, checkpoint_step: int | None
) -> RecoveryPoint:
    """From what each rank brings, and the step of the newest checkpoint."""
    best = max(((one.step, one.view) for one in held_shards.values() if one.step is not None), default=None)
    if best is None:
        return RecoveryPoint(checkpoint_step or 0)
    step, view = best
    able = {
        rank: one
        for rank, one in sorted(held_shards.items())
        if one.ways == replica_size and can_reach(one, step, view)
    }
    sources: dict[int, int] = {}
    for rank, one in able.items():
        sources.setdefault(one.part, rank)
    for rank, one in able.items():
        if one.mirrors is not None:
            sources.setdefault(one.mirrors, rank)
    if len(sources) < replica_size or (checkpoint_step or 0) > step:
        return RecoveryPoint(checkpoint_step or 0, lost_steps=max(step - (checkpoint_step or 0), 0))
    there = [rank for rank, one in able.items() if one.step == step]
    metadata_rank = min(there, key=lambda rank: (not held_shards[rank].evaluated, rank))
    return RecoveryPoint(step, sources, metadata_rank, view=view)


def can_reach(held: HeldShard, step: int, view: int) -> bool:
    """The first step of all is made again instead: before it, optimizers have nothing that others could be told of."""
    return (held.step, held.view) == (step, view) or (held.pending == view and held.step == step - 1 > 0)


@dataclass(frozen=True)
class ShardTransfer:
    """A part goes from the memory of one rank to another's."""

    shard_rank: int
    source_rank: int
    target_rank: int


def plan_transfers(
    point: RecoveryPoint, held_shards: Mapping[int, HeldShard], *, replica_size: int
) -> list[ShardTransfer]:
    """For every rank that does not hold the part of its place itself, in an order that all follow."""

    def stays(rank: int, one: HeldShard) -> bool:
        return one.ways == replica_size and one.part == rank % replica_size and can_reach(one, point.step, point.view)

    return [
        ShardTransfer(rank % replica_size, point.sources[rank % replica_size], rank)
        for rank, one in sorted(held_shards.items())
        if point.sources and not stays(rank, one)
    ]
