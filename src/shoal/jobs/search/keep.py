"""Space for checkpoints: those that will hardly be missed are deleted first, and trained again if they are needed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from shoal.jobs.search.journal import ForgottenRow
from shoal.jobs.search.search_dir import SearchPaths
from shoal.jobs.search.shared_files import FileSizes, SharedFiles, file_sizes, total_bytes
from shoal.jobs.search.table import Judge, SearchTable, TrialEntry
from shoal.jobs.search.trials import forget
from shoal.plan.search.standing import worth_keeping
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
        if total_bytes(self._sizes[t.number] for t in resting) <= self._limit_bytes:
            return
        order = self._in_order(resting, table)
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

    def _in_order(self, resting: Sequence[TrialEntry], table: SearchTable) -> list[TrialEntry]:
        """What is forgotten first: failed trials, then complete ones, then paused ones whose training so far was short
        or that many others were ahead of at their unit. The same part of a rung is promoted, whatever its unit."""
        paused = {trial.number: trial.unit for trial in resting if trial.state == "paused"}
        scores = {
            unit: self._judge.scores([t for t in table.trials.values() if t.unit >= unit], unit)
            for unit in set(paused.values())
        }
        worth = worth_keeping(paused, scores, {number: table.trials[number].cost_so_far for number in paused})

        def order(trial: TrialEntry) -> tuple[bool, bool, float, bool, float]:
            return (
                trial.state == "paused",
                trial.state == "complete",
                worth.get(trial.number, 0.0),
                not self._judge.breaks(trial),
                self._judge.score(trial),
            )

        return sorted(resting, key=order)
