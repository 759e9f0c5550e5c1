"""The result of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED, ShoalError
from shoal.spec.receipt import Receipt, metrics_mean_and_std
from shoal.spec.run_paths import RunPaths

PAUSED = "paused"
"""The status of a run that stopped where its caller wanted: it has a checkpoint of exactly that step."""
EXIT_BY_STATUS = {"finished": EXIT_OK, PAUSED: EXIT_OK, "interrupted": EXIT_INTERRUPTED}


@dataclass(frozen=True)
class RunResult:
    """A run ends with a receipt, with an error, or stopped and resumable.

    A job with folds has the results of its folds as `children`. Its status and error are those of the deciding fold,
    and it has no receipt of its own.
    """

    paths: RunPaths
    status: str
    receipt: Receipt | None = None
    error: ShoalError | None = None
    traceback: str = ""
    saved_step: int | None = None
    children: tuple[RunResult, ...] = ()

    @classmethod
    def of_folds(cls, paths: RunPaths, folds: tuple[RunResult, ...]) -> RunResult:
        status = next((fold.status for fold in folds if fold.status != "finished"), "finished")
        failure = next((fold.error for fold in folds if fold.error), None)
        return cls(paths, status, error=failure, children=folds)

    @property
    def folds(self) -> tuple[RunResult, ...]:
        return self.children

    @property
    def run(self) -> str:
        return self.paths.name

    @property
    def receipts(self) -> list[Receipt]:
        """The run's own receipt, or the receipts of its folds."""
        return [one.receipt for one in self.children or (self,) if one.receipt]

    @property
    def metrics(self) -> dict[str, tuple[float, float]]:
        """Mean and standard deviation of each metric over the folds."""
        return metrics_mean_and_std(self.receipts)

    @property
    def deciding(self) -> RunResult:
        """The first fold that did not finish, or else the last fold; the run itself if it has no folds."""
        return next((one for one in self.children if one.status != "finished"), (self, *self.children)[-1])

    @property
    def exit_code(self) -> int:
        last = self.deciding
        if last.error is not None:
            return EXIT_BUG if last.traceback else last.error.exit_code
        return EXIT_BY_STATUS.get(last.status, EXIT_TERMINATED)

    def receipt_data(self) -> dict[str, Any]:
        """The receipt as JSON data; for folds, their receipts and the metrics over them. Only for a finished run."""
        if not self.children:
            return self.receipts[0].model_dump(mode="json")
        return {
            "run": self.run,
            "folds": [receipt.model_dump(mode="json") for receipt in self.receipts],
            "metrics": {name: {"mean": mean, "std": std} for name, (mean, std) in self.metrics.items()},
        }
