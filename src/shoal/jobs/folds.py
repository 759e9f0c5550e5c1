"""The folds of a job: which are finished, which are pending, and their combined result."""

from __future__ import annotations

import json
from dataclasses import replace

from shoal.jobs.run_result import PAUSED, RunResult
from shoal.spec.data import FoldSplitConfig
from shoal.spec.job import Job
from shoal.spec.load import save_job
from shoal.spec.receipt import read_receipt_file
from shoal.spec.run_paths import RunPaths, write_atomically


class FoldSchedule:
    """Runs folds in order, up to `parallel` at the same time; with several seeds, all folds with each.

    After a fold that did not finish, no other fold is started. Folds that finished in an earlier start are not run
    again. `until`: pause after so many folds.
    """

    def __init__(self, job: Job, paths: RunPaths, *, until: int | None = None) -> None:
        split = job.data.split
        self._paths = paths
        self._parallel = split.parallel if isinstance(split, FoldSplitConfig) else 1
        self._until = job.fold_count if until is None else min(until, job.fold_count)
        self._folds = [paths.fold(number) for number in range(job.fold_count)]
        self._results: dict[RunPaths, RunResult] = {}
        self._waiting: dict[RunPaths, Job] = {}
        for number, fold in enumerate(self._folds):
            if receipt := read_receipt_file(fold.receipt).own:
                self._results[fold] = RunResult(fold, "finished", receipt=receipt)
            else:  # also if the receipt is damaged: the fold's driver writes it again from the events
                self._waiting[fold] = job.fold(number)
                fold.root.mkdir(exist_ok=True)
                save_job(self._waiting[fold], fold.job)

    def take_next(self, active: int) -> tuple[RunPaths, Job] | None:
        """The fold to start next while `active` folds are running; None if there is none to start now."""
        failed = any(result.status != "finished" for result in self._results.values())
        enough = len(self._results) + active >= self._until
        if failed or enough or not self._waiting or active >= self._parallel:
            return None
        fold = next(iter(self._waiting))
        return fold, self._waiting.pop(fold)

    def add(self, result: RunResult) -> None:
        self._results[result.paths] = result

    def finish(self, stop_reason: str) -> RunResult:
        """The combined result; the receipt is written if all folds finished. After a stop, folds that were not started
        count as stopped."""
        if stop_reason:
            self._results |= {fold: RunResult(fold, stop_reason) for fold in self._waiting}
        results = tuple(self._results[fold] for fold in self._folds if fold in self._results)
        whole = RunResult.of_folds(self._paths, results)
        if whole.status == "finished" and len(results) < len(self._folds):
            return replace(whole, status=PAUSED)
        if whole.status == "finished":
            write_atomically(self._paths.receipt, json.dumps(whole.receipt_data(), indent=2) + "\n")
        return whole
