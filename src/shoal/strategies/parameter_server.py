"""Training against parameter servers: `sync: server`. `staleness` decides how workers wait for each other.

Staleness 0: as with `lanes`, the sum of all lanes is applied once per step, and gives the same bits. Staleness k: every
lane pushes on its own, and none gets more than k steps ahead of the slowest. Infinite: no lane waits for another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from shoal.collectives.group import ViewGroup
from shoal.collectives.outcome import Discarded
from shoal.lanes.replica import Replica
from shoal.spec.view import View
from shoal.strategies.base import FinalModel
from shoal.strategies.context import StepContext
from shoal.strategies.parameter_server_sync import ParameterServerSync
from shoal.strategies.replicated import ReplicatedStrategy


class ParameterServerStrategy(ReplicatedStrategy):
    """See Strategy. Servers hold the state. The replica has the values of the last commit, and gets the rest when it is
    saved. The strategy tells the driver where parameters may be cut; the driver says which server holds which chunk."""

    def __init__(
        self, context: StepContext, replica: Replica, *, group: ViewGroup, server_sync: ParameterServerSync
    ) -> None:
        super().__init__(context, replica, group=group, sync=server_sync, lockstep=server_sync.exact)
        self._servers = server_sync
        context.place_chunks(server_sync.chunk_offsets, server_sync.set_chunk_table)

    def _first_step(self, step: int) -> int:
        return self._servers.first_step(step, self._lanes)

    def follow(self, view: View, seat: int) -> Iterator[bool]:
        """There is nothing to follow: servers apply the updates, and workers never see them."""
        yield from ()

    def _lanes_to_compute(self, step: int) -> Sequence[int]:
        """Leave out lanes that have already pushed this step in an earlier view."""
        return [lane for lane in self._lanes if self._servers.needs_lane(step, lane)]

    def _lane_weight(self, lane: int, size: int, total: int) -> float:
        return self._servers.lane_weight(lane, size, total)

    def _agree_on_weights(self) -> Discarded | None:
        return self._servers.barrier(self._replica, self._progress.step)

    def _complete_replica(self) -> Discarded | None:
        return self._servers.pull_state(self._replica, self._progress.step)

    def _external_blobs(self) -> Callable[[], Mapping[str, int]] | None:
        return self._servers.blobs if self._replica.tables else None

    def _final_model(self) -> FinalModel | Discarded:
        if discarded := self._complete_replica():
            return discarded
        rows_sha256 = self._servers.external_sha256()
        if isinstance(rows_sha256, Discarded):
            return rows_sha256
        model = super()._final_model()
        if isinstance(model, Discarded) or not rows_sha256:
            return model
        return replace(
            model,
            weights_sha256=_combined_sha256(model.weights_sha256, rows_sha256),
            state_sha256=_combined_sha256(model.state_sha256, rows_sha256),
        )

    def moved_bytes(self) -> int:
        return self._servers.moved_bytes()


def _combined_sha256(sha256: str, rows_sha256: str) -> str:
    """Combine the digest of the replica with that of the sparse rows, which the replica does not hold."""
    return hashlib.sha256(f"{sha256} {rows_sha256}".encode()).hexdigest()
