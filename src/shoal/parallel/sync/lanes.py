"""Exact synchronous training: lane sums are added on the fixed tree, then every replica applies the same total."""

from __future__ import annotations

from typing import Any

from shoal.parallel.replica import LaneSum, Replica
from shoal.parallel.sync.base import Committed, Discarded
from shoal.parallel.tree import TreeSum
from shoal.spec.view import View


class LanesSync:
    """With one worker that carries all lanes there is nobody to talk to: the tree is complete as it is."""

    def reconfigure(self, view: View, seat: int) -> None:
        if list(view.carries) != [seat]:
            raise ValueError(f"view {view.number} has other members than seat {seat}")

    def commit(self, replica: Replica, step: int, lanes: TreeSum[LaneSum]) -> Committed | Discarded:
        total = lanes.total()
        if total is None:
            return Discarded("no lane had samples")
        return Committed(replica.apply(step, total))

    def state(self) -> dict[str, Any]:
        return {}
