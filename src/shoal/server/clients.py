"""The workers that use stand-alone servers: facts in, views out."""

from __future__ import annotations

from shoal.fleet.roster import Peer, Roster
from shoal.spec.view import View


class ClientMembership:
    """A worker that has never connected is waited for. One that connected and was lost is away (evicted from the
    roster): nobody waits for it until the servers let it in again."""

    def __init__(self, workers: int, roster: Roster) -> None:
        self.roster = roster
        self._workers = workers
        self._number = 0
        self._changed = True

    def why_refused(self, worker: object) -> str:
        """Why nobody can connect as this worker; '' if one can."""
        if type(worker) is not int or not 0 <= worker < self._workers:
            return f"worker {worker!r:.40}, and there are {self._workers}: 0 to {self._workers - 1}"
        return f"worker {worker} is here already" if worker in self.roster else ""

    @property
    def present(self) -> list[int]:
        """Workers that the others wait for now."""
        return [worker for worker in self.roster if not self.roster.is_evicted(worker)]

    def add(self, worker: int, peer: Peer) -> bool:
        """A worker connects, maybe again. Was it away meanwhile? Then it must be let in beside the others."""
        self.roster.connect(worker, peer)
        self._changed = True
        return self.roster.is_evicted(worker)

    def mark_entered(self, worker: int) -> None:
        """The servers let it in, at a step beside the others'."""
        if self.roster.readmit(worker):
            self._changed = True

    def remove(self, worker: int) -> None:
        """It left, or its connection is lost."""
        self.roster.remove(worker)
        self.roster.evict(worker, "it left")
        self._changed = True

    def next_view(self, *, stop: str = "") -> View | None:
        """The next view, if anything changed: it carries workers that are here, and releases those that are away."""
        if not self._changed and not stop:
            return None
        self._changed = False
        self._number += 1
        carries = {worker: [worker] for worker in self.roster}
        return View(number=self._number, carries=carries, leave=self.roster.evicted, stop=stop)
