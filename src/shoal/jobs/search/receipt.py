"""The receipt of a search: what it decided and found, and whether any number of workers gives the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ConfigDict, Field, ValidationError

from shoal.errors import error
from shoal.jobs.search.journal import (
    AnyRow,
    ClosedRow,
    DecidedRow,
    DifferenceRow,
    ForgottenRow,
    ShapeRow,
    ToldRow,
    rows_of,
)
from shoal.jobs.search.search_dir import SearchPaths
from shoal.jobs.search.table import SearchTable
from shoal.spec.base import Spec
from shoal.spec.job import Job
from shoal.spec.receipt import FoldsReceipt, Receipt, read_receipt_file
from shoal.spec.run_paths import write_atomically


class SearchReceipt(Spec):
    """`decisions_sha256` is over all shapes, decisions and values, `search_sha256` also over the winner's weights.
    `exact` is None if nothing speaks against it and the winner's run checked nothing."""

    model_config = ConfigDict(allow_inf_nan=True, extra="ignore", ser_json_inf_nan="strings")

    search: str
    job_sha256: str
    exact: bool | None
    why: str
    trials: int
    failed: int
    decisions: int
    ended: str
    winner: int | None
    values: dict[str, float] = Field(default_factory=dict)
    changes: dict[str, Any] = Field(default_factory=dict)
    weights_sha256: str = ""
    decisions_sha256: str
    search_sha256: str
    starts: int = 1
    forgotten: int = 0
    interventions: list[str] = Field(default_factory=list)
    workers: int = 1
    total_s: float = 0.0


class WinnerRuns(NamedTuple):
    """What the run of a winner found, or its runs if it has folds or seeds: then the mean of each metric, one SHA-256
    over those of all weights, and the run that speaks most against being exact."""

    exact: bool | None
    why: str
    weights_sha256: str
    values: dict[str, float]


def read_winner(paths: SearchPaths, trial: int | None) -> WinnerRuns | None:
    """None without a winner, and if it has no receipt."""
    found = None if trial is None else read_receipt_file(paths.trial(trial).receipt).found
    if isinstance(found, Receipt):
        return WinnerRuns(found.exact, found.why, found.weights_sha256, dict(found.metrics))
    if not isinstance(found, FoldsReceipt) or not found.folds:
        return None
    judged = min(found.folds, key=lambda one: (False, None, True).index(one.exact))
    weights = hashlib.sha256(" ".join(one.weights_sha256 for one in found.folds).encode()).hexdigest()
    return WinnerRuns(judged.exact, judged.why, weights, {name: one.mean for name, one in found.metrics.items()})


def decisions_sha256(rows: Sequence[AnyRow]) -> str:
    """The SHA-256 over what was decided and what came of it. When a result came does not count."""
    return hashlib.sha256(json.dumps(canonical_rows(rows), sort_keys=True).encode()).hexdigest()


_NOT_COMPARED = {"seconds", "t", "machine", "mean", "error"}
"""Fields of a result that differ between machines, or follow from its rows."""


def canonical_rows(rows: Sequence[AnyRow]) -> dict[str, list[dict[str, Any]]]:
    """Shapes, decisions and results in the order of their numbers, without times and words."""
    shapes = {row.trial: row for row in rows_of(rows, ShapeRow)}
    told = {row.number: row for row in reversed(rows_of(rows, ToldRow))}
    decided = {row.number: row for row in rows_of(rows, DecidedRow)}
    return {
        "shapes": [_plain(shapes[n], leave_out={"machine", "memory"}) for n in sorted(shapes)],
        "decisions": [_plain(decided[n], leave_out={"why"}) for n in sorted(decided)],
        "results": [_plain(told[n], leave_out=_NOT_COMPARED) for n in sorted(told)],
    }


def _plain(row: ShapeRow | DecidedRow | ToldRow, *, leave_out: set[str]) -> dict[str, Any]:
    return dict(json.loads(row.model_dump_json(exclude=leave_out)))


def make_receipt(
    job: Job, paths: SearchPaths, rows: Sequence[AnyRow], *, workers: int, total_s: float
) -> SearchReceipt:
    """The receipt of a search whose journal has ended."""
    table = SearchTable.of(rows)
    assert table.ended is not None
    winner = None if table.ended.best is None else table.trials[table.ended.best]
    runs = read_winner(paths, table.ended.best)
    exact, why = judge_exactness(job, table, rows, runs)
    digest = decisions_sha256(rows)
    weights = table.ended.weights_sha256
    return SearchReceipt(
        search=paths.name,
        job_sha256=job.sha256(),
        exact=exact,
        why=why,
        trials=len(table.trials),
        failed=sum(trial.state == "failed" for trial in table.trials.values()),
        decisions=len(table.decisions),
        ended=table.ended.why,
        winner=table.ended.best,
        values=runs.values if runs else {},
        changes=dict(winner.changes) if winner else {},
        weights_sha256=weights,
        decisions_sha256=digest,
        search_sha256=hashlib.sha256(f"{digest} {table.ended.best} {weights}".encode()).hexdigest(),
        starts=table.starts,
        forgotten=len({row.trial for row in rows_of(rows, ForgottenRow)}),
        interventions=[f"closed: {row.why}" for row in rows_of(rows, ClosedRow)],
        workers=workers,
        total_s=round(total_s, 3),
    )


def judge_exactness(
    job: Job, table: SearchTable, rows: Sequence[AnyRow], winner: WinnerRuns | None
) -> tuple[bool | None, str]:
    """Whether any number of workers gives this search, and why."""
    if against := _reason_against(job, table, rows):
        return False, against
    if winner is None:
        return None, "no run of a winner speaks for it"
    return winner.exact, f"decisions in virtual order; the winner's run: {winner.why}"


def _reason_against(job: Job, table: SearchTable, rows: Sequence[AnyRow]) -> str:
    assert job.search is not None
    if job.search.order == "clock":
        return "order: clock counts results when they come"
    if job.inexact_reason:
        return f"its runs are not exact: {job.inexact_reason}"
    if job.search.wants_latency:
        return "latency is measured on this machine"
    for row in rows_of(rows, ClosedRow):
        return f"where it ended depends on the speed: {row.why}"
    for trial in table.trials.values():
        if trial.machine:
            return f"trial {trial.number} failed on this machine: {trial.failure}"
    for difference in rows_of(rows, DifferenceRow):
        return f"the values of trial {difference.trial} come from the journal; this machine would propose others"
    return ""


def write_receipt(paths: SearchPaths, receipt: SearchReceipt) -> None:
    write_atomically(paths.receipt, receipt.model_dump_json(indent=2) + "\n")


def read_receipt(path: Path) -> SearchReceipt | None:
    """The receipt of a search; None if it has none. SH631 if it is damaged."""
    try:
        return SearchReceipt.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValidationError, OSError) as problem:
        fix = "Delete it; `shoal search resume` writes it again from the journal."
        raise error("SH631", f"the receipt is damaged: {str(problem)[:200]}", where=str(path), fix=fix) from None
