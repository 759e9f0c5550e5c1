"""The workers that use stand-alone servers: facts in, views out."""

from __future__ import annotations

from shoal.fleet.roster import Peer, Roster
from shoal.spec.view import View


class ClientMembership:
    """The others wait for a worker that has never connected. A worker that connected and was lost is away (evicted from
    the roster): the others do not wait for it until the servers have admitted it again."""

    def __init__(self, workers: int, roster: Roster) -> None:
        self.roster = roster
        self._workers = workers
        self._number = 0
        self._changed = True

    def why_refused(self, worker: object) -> str:
        """Why a client cannot connect as this worker; '' if it can."""
        if type(worker) is not int or not 0 <= worker < self._workers:
            return f"worker {worker!r:.40}, and there are {self._workers}: 0 to {self._workers - 1}"
        return f"worker {worker} is here already" if worker in self.roster else ""

    @property
    def present(self) -> list[int]:
        """Workers that the others wait for now."""
        return [worker for worker in self.roster if not self.roster.is_evicted(worker)]

    def add(self, worker: int, peer: Peer) -> bool:
        """A worker connects, maybe again. True if it was away: then it must enter again, at the others' step."""
        self.roster.connect(worker, peer)
        self._changed = True
        return self.roster.is_evicted(worker)

    def mark_entered(self, worker: int) -> None:
        """The servers have admitted the worker, at the others' step."""
        if self.roster.readmit(worker):
            self._changed = True

    def remove(self, worker: int) -> None:
        """The worker left, or its connection was lost."""
        self.roster.remove(worker)
        self.roster.evict(worker, "it left")
        self._changed = True

    def next_view(self, *, stop: str = "") -> View | None:
        """The next view, if anything changed: `carries` has the connected workers, `leave` those that are away."""
        if not self._changed and not stop:
            return None
        self._changed = False
        self._number += 1
        carries = {worker: [worker] for worker in self.roster}
        return View(number=self._number, carries=carries, leave=self.roster.evicted, stop=stop)
