"""From which state the ranks of a new view continue: from memory, if it has all shards of the newest state. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class HeldShard:
    """The shard that one rank holds: number `part` of `ways`, after `step` steps; a step of None: no shard.

    `view` is the view in which the last step was committed: the same step made in two views may have different bits.
    `pending` is the view in which the rank has voted for one more step (two-phase commit); it can apply that step if it
    was committed there. `evaluated`: the rank has the results of this step's evaluation. `mirrors` is the shard of
    which the rank has a backup, from the same step.
    """

    step: int | None = None
    part: int = 0
    ways: int = 0
    view: int = 0
    pending: int | None = None
    evaluated: bool = False
    mirrors: int | None = None


@dataclass(frozen=True)
class RecoveryPoint:
    """The ranks continue after `step` steps, the last of which was committed in `view`. `sources` has the rank that
    holds each shard in memory; empty if the ranks load a checkpoint or start at step 0. `metadata_rank` has all other
    state. `lost_steps` must be repeated."""

    step: int = 0
    sources: dict[int, int] = field(default_factory=dict)
    metadata_rank: int = 0
    lost_steps: int = 0
    view: int = 0


def recovery_point(
    held_shards: Mapping[int, HeldShard], *, replica_size: int, checkpoint_step: int | None
) -> RecoveryPoint:
    """Decide from each rank's held shard and the step of the newest checkpoint: the newest state of which every shard
    is there. A rank may hold a higher step from before the others returned to a checkpoint."""
    states = {(one.step, one.view) for one in held_shards.values() if one.step is not None}
    saved = checkpoint_step or 0
    reached = max(((view, step) for step, view in states), default=(0, 0))[1]
    for step, view in sorted(states, reverse=True):
        able = {
            rank: one
            for rank, one in sorted(held_shards.items())
            if one.ways == replica_size and can_reach(one, step, view)
        }
        sources = _sources(able)
        if step >= saved and len(sources) == replica_size:
            at_step = [rank for rank, one in able.items() if one.step == step]
            metadata_rank = min(at_step, key=lambda rank: (not held_shards[rank].evaluated, rank))
            return RecoveryPoint(step, sources, metadata_rank, max(reached - step, 0), view)
    return RecoveryPoint(saved, lost_steps=max(reached - saved, 0))


def _sources(able: Mapping[int, HeldShard]) -> dict[int, int]:
    """The rank that has each shard: as its own, else as a backup."""
    sources: dict[int, int] = {}
    for rank, one in able.items():
        sources.setdefault(one.part, rank)
    for rank, one in able.items():
        if one.mirrors is not None:
            sources.setdefault(one.mirrors, rank)
    return sources


def can_reach(held: HeldShard, step: int, view: int) -> bool:
    """Whether the rank has this state, or can apply its pending step to reach it. The first step of a run is repeated
    instead, because optimizers have no state before it."""
    return (held.step, held.view) == (step, view) or (held.pending == view and held.step == step - 1 > 0)


@dataclass(frozen=True)
class ShardTransfer:
    """A shard is sent from the memory of one rank to another."""

    shard_rank: int
    source_rank: int
    target_rank: int


def plan_transfers(
    point: RecoveryPoint, held_shards: Mapping[int, HeldShard], *, replica_size: int
) -> list[ShardTransfer]:
    """One transfer for every rank that does not hold its own shard, in an order that all ranks follow."""

    def stays(rank: int, one: HeldShard) -> bool:
        return one.ways == replica_size and one.part == rank % replica_size and can_reach(one, point.step, point.view)

    return [
        ShardTransfer(rank % replica_size, point.sources[rank % replica_size], rank)
        for rank, one in sorted(held_shards.items())
        if point.sources and not stays(rank, one)
    ]
