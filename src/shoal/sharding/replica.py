"""A replica of which this rank holds one shard, with the interface of a Replica.

A lane's sum has this rank's shards of the gradients. Ranks with the same shard of other replicas add their sums up, as
replicas do. The ranks of one replica make every step at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint.slices import PieceReader, TensorPiece
from shoal.lanes.clipping import Clipping, clip_coefficient, divisor_of, scale_gradients
from shoal.lanes.lane_sum import LaneSum
from shoal.lanes.loss import Loss, LossFunction
from shoal.lanes.replica import GradientSink, Replica
from shoal.lanes.rng import LaneRng
from shoal.sharding.deferred_init import named_tensors
from shoal.sharding.device_mesh import all_reduce_sum, broadcast
from shoal.sharding.local_state import (
    LocalState,
    copy_from_pieces,
    hyperparameters,
    is_persistent,
    load_hyperparameters,
    load_local_state,
    owned_pieces,
)
from shoal.sharding.optimizer_factory import OptimizerFactory
from shoal.sharding.sharded_model import ShardedModel
from shoal.spec import seeds


class ShardedReplica(Replica):
    """See Replica. The optimizer is made from `local_state.param_module` and is elementwise. `why_not_deferred`, if not
    '', says why the model was built in full before it was sharded."""

    why_not_deferred = ""
    optimizer_factory: OptimizerFactory
    """Makes further optimizers like this replica's; set when the replica is built."""

    def __init__(
        self,
        sharded_model: ShardedModel,
        local_state: LocalState,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        *,
        seed: int,
        schedule: Any = None,
        schedule_every: int = 1,
        clipping: Clipping | None = None,
        autocast: torch.dtype | None = None,
        rng: LaneRng | None = None,
    ) -> None:
        super().__init__(
            local_state.param_module,
            optimizer,
            loss,
            seed=seed,
            schedule=schedule,
            schedule_every=schedule_every,
            clipping=clipping,
            autocast=autocast,
            rng=rng,
        )
        self.sharded_model, self.local_state = sharded_model, local_state
        self.model = sharded_model.model
        self.set_train_mode()
        self._set_moving_buffers([])

    def probe(self, batch: Any) -> None:
        """Find the moving buffers: all ranks run one pass and restore their buffers."""
        before = {name: shard.local_tensor.clone() for name, shard in self._buffer_shards.items()}
        self.rng.seed_all(self._seed, seeds.LANE, 0, 0)
        self.sharded_model.forward_backward(self._autocast_loss, batch, 1.0)
        for shard in self.local_state.trainable:
            shard.pop_gradient()
        changed = [
            name for name, shard in self._buffer_shards.items() if not torch.equal(shard.local_tensor, before[name])
        ]
        for name in changed:
            self._buffer_shards[name].local_tensor.copy_(before[name])
        self._set_moving_buffers(changed)

    @property
    def _buffer_shards(self) -> dict[str, Any]:
        return {n: p for n, p in self.local_state.shards.items() if not isinstance(p.local_tensor, nn.Parameter)}

    def forward_backward(
        self, step: int, lane: int, batch: Any, *, share: float, sink: GradientSink | None = None
    ) -> LaneSum:
        """See Replica. If each rank runs its own lane (`shares_lane` is false), the sum covers the lanes of all ranks.
        A rank without a lane passes any batch with a share of 0."""
        if self.moving_buffers.names:
            self.moving_buffers.restore()
        self.rng.seed_all(self._seed, seeds.LANE, step, lane)
        value, count = self.sharded_model.forward_backward(self._autocast_loss, batch, share)
        float_buffers, int_buffers = (
            self.moving_buffers.weighted_copies(share) if self.moving_buffers.names else ([], [])
        )
        if not self.sharded_model.shares_lane:
            mesh = self.sharded_model.mesh
            all_reduce_sum([value, *float_buffers, *([] if count is None else [count])], mesh.shard_group)
            broadcast(int_buffers, mesh.global_rank(0), mesh.shard_group)
        for shard in self.local_state.trainable:
            shard.local_tensor.grad = shard.pop_gradient()
        return LaneSum(self._collect_grads(sink), float_buffers, int_buffers, value, count, [])

    def _autocast_loss(self, model: nn.Module, batch: Any) -> Loss:
        with self.autocast_context():
            return self._loss(model, batch)

    def reduce_across_replicas(self, total: LaneSum) -> None:
        """Sum with the ranks that hold the same shard of other replicas."""
        mesh = self.sharded_model.mesh
        tensors = [*total.grads, *total.float_buffers, total.loss, *([] if total.count is None else [total.count])]
        all_reduce_sum(tensors, mesh.replica_group)
        if mesh.replicas > 1:
            broadcast(total.int_buffers, mesh.shard_rank, mesh.replica_group)

    def scale_sum(self, total: LaneSum) -> None:
        """See Replica. The norm is that of the whole gradient: each value counts once, on its owner."""
        grads, clip, count, coefficient = total.grads, self.clipping, total.count, None
        if clip.norm is not None:
            own = [g for g, shard in zip(grads, self.local_state.trainable, strict=True) if shard.is_owner]
            square = sum((g.double().square().sum() for g in own), torch.zeros((), dtype=torch.float64))
            all_reduce_sum([square], self.sharded_model.mesh.shard_group)
            coefficient = clip_coefficient([square.sqrt()], clip=clip.norm, count=count).to(grads[0].dtype)
        divisor = None if count is None else divisor_of(count, grads[0].dtype)
        scale_gradients(grads, count=divisor, coefficient=coefficient, value=clip.value)

    # ---- state ----

    def state(self) -> dict[str, Any]:
        """The state that all ranks have in common, besides their pieces."""
        return {
            "settings": hyperparameters(self.optimizer),
            "schedule": self.schedule.state_dict() if self.schedule else None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        load_hyperparameters(self.optimizer, state["settings"])
        if self.schedule:
            self.schedule.load_state_dict(state["schedule"])

    def pieces(self) -> dict[str, TensorPiece]:
        """The pieces that this rank owns, not copied; the pieces of all ranks make up the replica."""
        non_persistent = {n: self.local_state.shards[n] for n in self._moving_non_persistent}
        moving = {
            f"/moving/{n}": TensorPiece(shard.tensor_slice, shard.local_tensor)
            for n, shard in non_persistent.items()
            if shard.is_owner
        }
        return owned_pieces(self.local_state, self.optimizer) | moving

    @torch.no_grad()
    def load_pieces(self, pieces: PieceReader) -> None:
        """Load from the pieces of all ranks, with any sharding."""
        load_local_state(self.local_state, pieces, self.optimizer)
        for name in self._moving_non_persistent:
            shard = self.local_state.shards[name]
            copy_from_pieces(shard.local_tensor, shard.tensor_slice, f"/moving/{name}", pieces)

    @property
    def _moving_non_persistent(self) -> list[str]:
        """Moving buffers that are not in the state dict."""
        return [name for name in self.moving_buffers.names if not is_persistent(self.local_state, name)]

    def all_tensors(self) -> dict[str, Tensor]:
        """All local tensors, not copied: what another rank with this shard needs."""
        tensors = {f"/model/{name}": shard.local_tensor.detach() for name, shard in self.local_state.shards.items()}
        for shard in self.local_state.trainable:
            state = self.optimizer.state.get(shard.local_tensor, {})
            tensors |= {f"/optimizer/{shard.name}/{key}": v for key, v in state.items() if isinstance(v, Tensor)}
        return tensors

    @torch.no_grad()
    def load_all_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the tensors of a rank with the same shard and sharding. The optimizer may keep them."""
        for name, shard in self.local_state.shards.items():
            shard.local_tensor.copy_(tensors[f"/model/{name}"])
        for shard in self.local_state.trainable:
            start = f"/optimizer/{shard.name}/"
            for key in [key for key in tensors if key.startswith(start)]:
                self.optimizer.state[shard.local_tensor][key.removeprefix(start)] = tensors[key]

    def state_dict_names(self) -> dict[str, str]:
        """The names in the whole model's state dict, each with the first name of its tensor."""
        first_names = {id(tensor): name for name, tensor in named_tensors(self.model).items()}
        return {name: first_names[id(tensor)] for name, tensor in self.model.state_dict(keep_vars=True).items()}
