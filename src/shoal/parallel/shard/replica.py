"""A replica of which this process holds a part, for the loop that knows replicas.

What a lane gives is the sum of this process's parts of the gradients. Processes that hold the same parts of other
replicas add theirs up as replicas always do; those that hold one replica together take every step at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint.boxes import Piece, Pieces
from shoal.parallel.clipping import Clipping, coefficient, scale
from shoal.parallel.lane_sum import LaneSum
from shoal.parallel.randomness import Chance
from shoal.parallel.replica import Loss, LossFunction, Replica, Taker
from shoal.parallel.shard.blueprint import named_tensors
from shoal.parallel.shard.cut import Cut
from shoal.parallel.shard.grid import add_up, take_from
from shoal.parallel.shard.held import Held, copy_in, is_kept, load, load_settings, pieces_of, settings_of
from shoal.parallel.shard.recipe import Recipe
from shoal.spec import seeds


class ShardedReplica(Replica):
    """See Replica. The optimizer is made of `held.bare`, and treats every element by itself. `why_whole`, if not '',
    tells why the model was made in full before it was cut."""

    why_whole = ""
    recipe: Recipe
    """Of its optimizer, from who formed it."""

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
        chance: Chance | None = None,
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
            chance=chance,
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

    # ---- state ----

    def state(self) -> dict[str, Any]:
        """What all members have alike, besides their pieces."""
        return {
            "settings": settings_of(self.optimizer),
            "schedule": self.schedule.state_dict() if self.schedule else None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        load_settings(self.optimizer, state["settings"])
        if self.schedule:
            self.schedule.load_state_dict(state["schedule"])

    def pieces(self) -> dict[str, Piece]:
        """What this process answers for, as references; together with the other members' it is the replica."""
        fleeting = {n: self.held.parts[n] for n in self._fleeting}
        more = {f"/moving/{n}": Piece(part.box, part.local) for n, part in fleeting.items() if part.first}
        return pieces_of(self.held, self.optimizer) | more

    @torch.no_grad()
    def load_pieces(self, pieces: Pieces) -> None:
        """From the pieces of all members, of whatever layout."""
        load(self.held, pieces, self.optimizer)
        for name in self._fleeting:
            part = self.held.parts[name]
            copy_in(part.local, part.box, f"/moving/{name}", pieces)

    @property
    def _fleeting(self) -> list[str]:
        """Buffers that move although no state dict has them."""
        return [name for name in self.moving.names if not is_kept(self.held, name)]

    def everything(self) -> dict[str, Tensor]:
        """All that is here, as references: what another member with this place needs."""
        found = {f"/model/{name}": part.local.detach() for name, part in self.held.parts.items()}
        for part in self.held.trainable:
            state = self.optimizer.state.get(part.local, {})
            found |= {f"/optimizer/{part.name}/{key}": v for key, v in state.items() if isinstance(v, Tensor)}
        return found

    @torch.no_grad()
    def take_everything(self, found: Mapping[str, Tensor]) -> None:
        """From a member with this place, of a replica that was cut in the same way. Tensors may be kept."""
        for name, part in self.held.parts.items():
            part.local.copy_(found[f"/model/{name}"])
        for part in self.held.trainable:
            start = f"/optimizer/{part.name}/"
            for key in [key for key in found if key.startswith(start)]:
                self.optimizer.state[part.local][key.removeprefix(start)] = found[key]

    def names(self) -> dict[str, str]:
        """The names that the whole model's state dict has, each with the one under which its values lie."""
        first = {id(tensor): name for name, tensor in named_tensors(self.model).items()}
        return {name: first[id(tensor)] for name, tensor in self.model.state_dict(keep_vars=True).items()}
