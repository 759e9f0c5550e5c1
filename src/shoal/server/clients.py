"""Which workers are connected, and for whom nobody waits any more: facts in, views out."""

from __future__ import annotations

from shoal.spec.view import View


class ClientRoster:
    """A worker that has never come is waited for; one that came and was lost is not, until it is in again."""

    def __init__(self, workers: int) -> None:
        self.callers: dict[int, int] = {}
        """By worker."""
        self.away: set[int] = set()
        self._workers = workers
        self._number = 0
        self._changed = True

    def why_refused(self, worker: object) -> str:
        """Why nobody can come as this worker; '' if one can."""
        if type(worker) is not int or not 0 <= worker < self._workers:
            return f"worker {worker!r:.40}, and there are {self._workers}: 0 to {self._workers - 1}"
        return ""

    def add(self, worker: int, caller: int) -> bool:
        """It connects, maybe again. Was it given up meanwhile? Then it must be let in beside the others."""
        self.callers[worker] = caller
        self._changed = True
        return worker in self.away

    def mark_entered(self, caller: int) -> None:
        """The servers let it in, at a step beside the others'."""
        worker = self.worker_of(caller)
        if worker is not None and worker in self.away:
            self.away.discard(worker)
            self._changed = True

    def remove(self, worker: int) -> None:
        """It left, or its connection is lost."""
        self.callers.pop(worker, None)
        self.away.add(worker)
        self._changed = True

    def worker_of(self, caller: int) -> int | None:
        return next((worker for worker, one in self.callers.items() if one == caller), None)

    def next_view(self, *, stop: str = "") -> View | None:
        """The next view, if anything changed: it carries who is here, and lets go who is away."""
        if not self._changed and not stop:
            return None
        self._changed = False
        self._number += 1
        carries = {worker: [worker] for worker in sorted(self.callers)}
        return View(number=self._number, carries=carries, leave=sorted(self.away), stop=stop)
