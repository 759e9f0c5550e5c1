"""A replica of which this process holds a part, for the loop that knows replicas.

What a lane gives is the sum of this process's parts of the gradients. Processes that hold the same parts of other
replicas add theirs up as replicas always do; those that hold one replica together take every step at the same time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shoal.parallel.clipping import Clipping, coefficient, scale
from shoal.parallel.lane_sum import LaneSum
from shoal.parallel.replica import Loss, LossFunction, Replica, Taker
from shoal.parallel.shard.cut import Cut
from shoal.parallel.shard.grid import add_up, take_from
from shoal.parallel.shard.held import Held, Pieces, load, load_settings, pieces_of, settings_of
from shoal.spec import seeds


class ShardedReplica(Replica):
    """See Replica. The optimizer is made of `held.bare`, and treats every element by itself."""

    def __init__(
        self,
        cut: Cut,
        held: Held,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        *,
        seed: int,
        schedule: Any = None,
        schedule_every: int = 1,
        clipping: Clipping | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            held.bare,
            optimizer,
            loss,
            seed=seed,
            schedule=schedule,
            schedule_every=schedule_every,
            clipping=clipping,
            autocast=autocast,
        )
        self.cut, self.held = cut, held
        self.model = cut.model
        self.to_training()
        self._set_moving([])

    def probe(self, batch: Any) -> None:
        """Find the moving buffers: all members run one pass and put everything back."""
        before = {name: part.local.clone() for name, part in self._buffers.items()}
        self.chance.fully(self._seed, seeds.LANE, 0, 0)
        self.cut.run(self._casting_loss, batch, 1.0)
        for part in self.held.trainable:
            part.take_gradient()
        changed = [name for name, part in self._buffers.items() if not torch.equal(part.local, before[name])]
        for name in changed:
            self._buffers[name].local.copy_(before[name])
        self._set_moving(changed)

    @property
    def _buffers(self) -> dict[str, Any]:
        return {n: p for n, p in self.held.parts.items() if not isinstance(p.local, nn.Parameter)}

    def forward_backward(
        self, step: int, lane: int, batch: Any, *, share: float, taker: Taker | None = None
    ) -> LaneSum:
        """See Replica. Where members bring lanes of their own (`cut.together` is false), the sum is of all of them; one
        that has no lane left brings any batch, with a share of 0."""
        if self.moving.names:
            self.moving.restore()
        self.chance.fully(self._seed, seeds.LANE, step, lane)
        value, count = self.cut.run(self._casting_loss, batch, share)
        averaged, first = self.moving.take(share) if self.moving.names else ([], [])
        if not self.cut.together:
            grid = self.cut.grid
            add_up([value, *averaged, *([] if count is None else [count])], grid.shard_group)
            take_from(first, grid.rank_of(0), grid.shard_group)
        for part in self.held.trainable:
            part.local.grad = part.take_gradient()
        return LaneSum(self._take_grads(taker), averaged, first, value, count, [])

    def _casting_loss(self, model: nn.Module, batch: Any) -> Loss:
        with self.casting():
            return self._loss(model, batch)

    def agree(self, total: LaneSum) -> None:
        """Add up with those who hold the same parts of other replicas."""
        grid = self.cut.grid
        tensors = [*total.grads, *total.averaged, total.loss, *([] if total.count is None else [total.count])]
        add_up(tensors, grid.replica_group)
        if grid.replicas > 1:
            take_from(total.first, grid.seat, grid.replica_group)

    def scale(self, total: LaneSum) -> None:
        """The norm is that of the whole gradient: each value counts once, whoever has it."""
        grads, clip, count, by = total.grads, self.clipping, total.count, None
        if clip.norm is not None:
            mine = [g for g, part in zip(grads, self.held.trainable, strict=True) if part.first]
            square = sum((g.double().square().sum() for g in mine), torch.zeros((), dtype=torch.float64))
            add_up([square], self.cut.grid.shard_group)
            by = coefficient([square.sqrt()], clip=clip.norm, count=count).to(grads[0].dtype)
        scale(grads, count=count if count is None else count.to(grads[0].dtype), coefficient=by, value=clip.value)

    def state(self) -> dict[str, Any]:
        """What this process answers for, as references; together with the other members' it is the replica's state."""
        return {
            "pieces": pieces_of(self.held, self.optimizer),
            "settings": settings_of(self.optimizer),
            "schedule": self.schedule.state_dict() if self.schedule else None,
            "moving": list(self.moving.names),
        }

    def load_pieces(self, pieces: Pieces, state: dict[str, Any]) -> None:
        """From the pieces of all members, of whatever layout, and the rest of any member's state."""
        load(self.held, pieces, self.optimizer)
        load_settings(self.optimizer, state["settings"])
        if self.schedule:
            self.schedule.load_state_dict(state["schedule"])
