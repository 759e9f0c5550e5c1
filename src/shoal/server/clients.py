"""Which workers are connected, and for which the others do not wait: facts in, views out."""

from __future__ import annotations

from shoal.spec.view import View


class ClientRoster:
    """The others wait for a worker that has never connected, but not for one that was lost, until it has entered
    again."""

    def __init__(self, workers: int) -> None:
        self.callers: dict[int, int] = {}
        """The control connection of each worker."""
        self.away: set[int] = set()
        self._workers = workers
        self._number = 0
        self._changed = True

    def why_refused(self, worker: object) -> str:
        """Why a client cannot connect as this worker; '' if it can."""
        if type(worker) is not int or not 0 <= worker < self._workers:
            return f"worker {worker!r:.40}, and there are {self._workers}: 0 to {self._workers - 1}"
        return ""

    def add(self, worker: int, caller: int) -> bool:
        """A worker connects, maybe again. True if it was away: then it must enter again, at the others' step."""
        self.callers[worker] = caller
        self._changed = True
        return worker in self.away

    def mark_entered(self, caller: int) -> None:
        """The servers have admitted the worker, at the others' step."""
        worker = self.worker_of(caller)
        if worker is not None and worker in self.away:
            self.away.discard(worker)
            self._changed = True

    def remove(self, worker: int) -> None:
        """The worker left, or its connection was lost."""
        self.callers.pop(worker, None)
        self.away.add(worker)
        self._changed = True

    def worker_of(self, caller: int) -> int | None:
        return next((worker for worker, one in self.callers.items() if one == caller), None)

    def next_view(self, *, stop: str = "") -> View | None:
        """The next view, if anything changed: `carries` has the connected workers, `leave` those that are away."""
        if not self._changed and not stop:
            return None
        self._changed = False
        self._number += 1
        carries = {worker: [worker] for worker in sorted(self.callers)}
        return View(number=self._number, carries=carries, leave=sorted(self.away), stop=stop)
