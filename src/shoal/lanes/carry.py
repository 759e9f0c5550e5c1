"""What a lane hands to itself at the next step, such as the hidden state of a recurrent network.

It belongs to the lane and not to a worker, so all workers hold what all lanes carry: whoever gets the lane next goes on
with it. Only a committed step changes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.checkpoint.state_tree import State, flatten, unflatten


class Carrier(Protocol):
    """The task: while a lane is computed, `carry` is what that lane carries."""

    carry: dict[str, Any]


class LaneCarry:
    """Belongs to the replica. At the first step of an epoch every lane starts with nothing."""

    def __init__(self, carrier: Carrier, *, steps_per_epoch: int, device: torch.device) -> None:
        self._carrier = carrier
        self._device = device
        self._steps_per_epoch = steps_per_epoch
        self._committed: dict[int, State] = {}
        self._new: dict[int, State] = {}
        carrier.carry = {}

    def give(self, step: int, lane: int) -> None:
        """Before a lane is computed: the task gets its own copy."""
        starts = step % self._steps_per_epoch == 0
        self._carrier.carry = {} if starts else _copied(self._committed.get(lane, {}), self._device)

    def take(self, lane: int) -> None:
        """After a lane was computed."""
        self._new[lane] = _copied(self._carrier.carry, self._device)
        self._carrier.carry = {}

    @property
    def new(self) -> dict[int, State]:
        """What the lanes of this worker carry on from this step, for the other workers."""
        return self._new

    def add_peers(self, carried: Mapping[int, State]) -> None:
        """What lanes of other workers carry on from this step."""
        self._new.update(carried)

    def commit(self) -> None:
        self._committed, self._new = {lane: self._new[lane] for lane in sorted(self._new)}, {}

    def drop(self) -> None:
        """The step does not count."""
        self._new = {}

    def state(self) -> dict[int, State]:
        return self._committed

    def load_state(self, state: Mapping[int, State]) -> None:
        self._committed, self._new = dict(state), {}


def _copied(state: State, device: torch.device) -> State:
    """The state as a checkpoint would give it back, cut off from the graph."""
    tensors, skeleton = flatten(state)
    copies: dict[str, Tensor] = {name: tensor.detach().to(device, copy=True) for name, tensor in tensors.items()}
    return unflatten(copies, skeleton)
