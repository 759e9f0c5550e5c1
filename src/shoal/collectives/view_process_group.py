"""The torch process group of the present view: made when the view is entered, left when it fails."""

from __future__ import annotations

import torch

from shoal.collectives.group import ViewGroup
from shoal.collectives.outcome import Discarded
from shoal.collectives.torch_group import AbortableProcessGroup, GroupOperation, has_nccl, rendezvous
from shoal.errors import error
from shoal.net.errors import LinkError
from shoal.spec.view import View

CLOSE_TIMEOUT_S = 2.0


def pick_backend(wanted: str, device: torch.device) -> str:
    """`auto` is nccl for CUDA where torch has it, else gloo."""
    possible = device.type == "cuda" and has_nccl()
    if wanted == "nccl" and not possible:
        fix = "Write sync.backend: auto or gloo."
        raise error("SH411", f"nccl does not work on device '{device}' here", where="sync.backend", fix=fix)
    return ("nccl" if possible else "gloo") if wanted == "auto" else wanted


class ViewProcessGroup:
    """Belongs to a sync and its thread; an abort of the view wakes it from any thread. A single worker has none."""

    def __init__(self, group: ViewGroup, *, backend: str, device: torch.device) -> None:
        self._group = group
        self._backend = pick_backend(backend, device)
        self._device = device
        self._made: AbortableProcessGroup | None = None
        group.on_abort.append(self.leave)

    @property
    def exists(self) -> bool:
        return self._made is not None

    def enter(self, view: View, seat: int) -> Discarded | None:
        """Switch to another view. Returns when all its members have connected."""
        self._drop()
        if discarded := self._group.enter(view, seat):
            return discarded
        if self._group.mesh is None:
            return None
        ranks = {member: rank for rank, member in enumerate(sorted(view.carries))}
        try:
            with rendezvous(self._group, ranks) as place:
                self._made = AbortableProcessGroup(self._backend, place, self._device)
                if self._group.aborted():
                    self._made.leave()
                self._made.run(lambda group: None)  # returns when all members have connected
        except LinkError as failure:
            return self.discard(failure)
        return None

    def run(self, operation: GroupOperation) -> None:
        """LinkError if it fails, or when this member leaves."""
        assert self._made is not None
        self._made.run(operation)

    def discard(self, failure: LinkError) -> Discarded:
        """Leave the process group at once, so that members that wait for this worker notice the failure."""
        self.leave()
        return Discarded(self._group.broken) if self._group.broken else self._group.discard(failure)

    def leave(self) -> None:
        """May be called from any thread."""
        made = self._made
        if made:
            made.leave()

    def _drop(self) -> AbortableProcessGroup | None:
        made, self._made = self._made, None
        if made:
            made.leave()
        self._group.leave()
        return made

    def close(self) -> None:
        if made := self._drop():
            made.join(CLOSE_TIMEOUT_S)
