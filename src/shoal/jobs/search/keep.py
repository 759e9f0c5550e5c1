"""Space for checkpoints: those of the worst-placed trials are deleted first, and trained again if they are needed."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from shoal.jobs.search.journal import ForgottenRow
from shoal.jobs.search.search_dir import SearchPaths
from shoal.jobs.search.shared_files import FileSizes, SharedFiles, file_sizes, total_bytes
from shoal.jobs.search.table import Judge, SearchTable, TrialEntry
from shoal.jobs.search.trials import forget
from shoal.spec.job import Job


class Keeper:
    """Measures the checkpoints of trials that have stopped, and stores equal parts of them once."""

    def __init__(self, job: Job, paths: SearchPaths) -> None:
        assert job.search is not None
        self._paths = paths
        self._limit_bytes = None if job.search.policy.kind == "population" else job.search.keep_bytes
        self._shared = SharedFiles()
        self._judge = Judge.of(job)
        self._sizes: dict[int, FileSizes] = {}

    def make_room(self, table: SearchTable, *, busy: Collection[int]) -> Iterator[ForgottenRow]:
        """Delete checkpoints until the rest fits, and yield a row for each trial. Trials in `busy` keep theirs."""
        begun = (t for t in table.trials.values() if t.unit or t.state == "failed")
        resting = [t for t in begun if t.number not in busy and not t.forgotten]
        for number in busy:
            self._sizes.pop(number, None)
        for trial in resting:
            if trial.number not in self._sizes:
                self._measure(trial.number)
        if self._limit_bytes is None:
            return
        order = sorted(resting, key=self._worth)
        while order and total_bytes(self._sizes[t.number] for t in order) > self._limit_bytes:
            trial = order.pop(0)
            if self._sizes[trial.number]:
                forget(self._paths.trial(trial.number))
                yield ForgottenRow(trial=trial.number)
            self._sizes[trial.number] = {}

    def _measure(self, number: int) -> None:
        paths = self._paths.trial(number)
        self._shared.share(paths)
        self._sizes[number] = file_sizes(paths)

    def _worth(self, trial: TrialEntry) -> tuple[bool, bool, int, float]:
        """Small for what is forgotten first: failed trials, then complete ones, then those at a low unit with a bad
        value."""
        return trial.state == "paused", trial.state == "complete", trial.unit, self._judge.score(trial)
