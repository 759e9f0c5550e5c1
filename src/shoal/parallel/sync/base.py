"""Sync: how replicas agree on a step. Failure is a value here: a step counts, or it is discarded with a reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from shoal.parallel.replica import LaneSum, Replica
from shoal.parallel.tree import TreeSum
from shoal.spec.view import View


@dataclass(frozen=True)
class Committed:
    """The step counts: the replica has changed."""

    loss: Tensor
    bytes_sent: int = 0


@dataclass(frozen=True)
class Discarded:
    """The step does not count, and the replica is as it was. A new view must follow."""

    why: str


class Sync(Protocol):
    def reconfigure(self, view: View, seat: int) -> None:
        """Another view counts from now on."""

    def commit(self, replica: Replica, step: int, lanes: TreeSum[LaneSum]) -> Committed | Discarded:
        """Agree on the sum and apply it. Called once per step, by the loop's thread."""

    def state(self) -> dict[str, Any]:
        """What must survive besides the replica."""
