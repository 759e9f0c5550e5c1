"""Past and present searches, read from their directories."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError, error
from shoal.jobs import run_dir
from shoal.jobs.search import search_dir
from shoal.jobs.search.journal import AnyRow, ToldRow, read_rows
from shoal.jobs.search.receipt import SearchReceipt, canonical_rows, read_receipt
from shoal.jobs.search.replay import replay
from shoal.jobs.search.search_dir import SearchPaths
from shoal.jobs.search.table import Judge, SearchTable, TrialEntry
from shoal.jobs.search.trials import seeds_of
from shoal.plan.search.make import make_search
from shoal.plan.search.summary import SearchSummary, summarise
from shoal.spec.job import Job
from shoal.spec.load import load_run_job
from shoal.spec.run_paths import RunPaths
from shoal.spec.search.trial_job import make_trial_job
from shoal.spec.yaml_document import write_value


@dataclass(frozen=True)
class StoredSearch:
    """A search as its directory tells it."""

    paths: SearchPaths
    job: Job
    rows: list[AnyRow]
    table: SearchTable
    receipt: SearchReceipt | None
    status: str

    @cached_property
    def summary(self) -> SearchSummary | None:
        """History, front and importance, as the plan knows them; None if this version would decide otherwise, or if the
        journal is damaged."""
        plan = make_search(self.job)
        try:
            replay(plan, self.rows)
            plan.decide()  # counts the results that came after the last decision
        except ShoalError:
            return None
        return summarise(plan)

    @property
    def importance(self) -> dict[str, float]:
        """The share of each key of the space, the largest first; empty while there are too few trials."""
        return {} if self.summary is None else dict(self.summary.importance)

    @cached_property
    def judge(self) -> Judge:
        return Judge.of(self.job)

    @property
    def ranked(self) -> list[TrialEntry]:
        return self.judge.ranked(self.table)

    @property
    def best(self) -> TrialEntry | None:
        """The winner, or the best so far that breaks no constraint."""
        if self.table.ended is not None:
            return None if self.table.ended.best is None else self.table.trials.get(self.table.ended.best)
        return self.judge.best(self.table)


def load_search(name: str, runs: Path) -> StoredSearch:
    return read_search(search_dir.find(name, runs))


def read_search(paths: SearchPaths) -> StoredSearch:
    rows = read_rows(paths.journal)[0]
    table = SearchTable.of(rows)
    receipt = read_receipt(paths.receipt)
    status = "finished" if table.ended else "searching" if run_dir.is_driven(paths.run) else "stopped"
    return StoredSearch(paths, load_run_job(paths.job), rows, table, receipt, status)


def best_job_text(found: StoredSearch) -> str:
    """The job file of the winner, or of the best trial so far. It trains the same bits on any number of workers."""
    best = found.best
    if best is None:
        fix = f"`shoal search show {found.paths.name}` tells why." if found.table.ended else ""
        which = "has won" if found.table.ended else "has a value"
        raise error("SH606", f"no trial of '{found.paths.name}' {which}", where=found.paths.name, fix=fix)
    job = make_trial_job(found.job, best.changes, check_names=False)
    return write_value(job.model_copy(update={"lanes": job.lane_count, "seeds": seeds_of(found.job)}).dump())


def trial_data(found: StoredSearch, trial: TrialEntry) -> dict[str, Any]:
    return {
        "trial": trial.number,
        "state": found.judge.phase(trial),
        "unit": trial.unit,
        "units": trial.units,
        "values": _finite(found.judge.values(trial)),
        "standard_errors": _finite(trial.standard_errors) if found.job.averages_runs else {},
        "changes": dict(trial.changes),
        "facts": dict(trial.facts),
        "failure": trial.failure,
        "why": trial.why,
        "copy_of": trial.copy_of,
        "rows": json.loads(ToldRow(number=0, rows=trial.rows).model_dump_json(include={"rows"}))["rows"],
    }


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    """JSON has no other numbers."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


def search_data(found: StoredSearch) -> dict[str, Any]:
    """The search as JSON data."""
    return {
        "search": found.paths.name,
        "status": found.status,
        "best": None if found.best is None else found.best.number,
        "spent": round(found.table.spent, 4),
        "decisions": len(found.table.decisions),
        "starts": found.table.starts,
        "importance": found.importance,
        "front": [] if found.summary is None else list(found.summary.front),
        "trials": [trial_data(found, trial) for trial in found.table.trials.values()],
        "receipt": None if found.receipt is None else json.loads(found.receipt.model_dump_json()),
    }


def summary_row(paths: RunPaths) -> dict[str, Any]:
    """What `shoal runs` shows of a search, in place of the fields of a run. Damage is told, not raised."""
    try:
        found = read_search(SearchPaths(paths))
    except ShoalError as failure:
        return {"status": "search unreadable", "damage": str(failure.message)}
    best = found.best
    values = {} if best is None else found.judge.values(best)
    return {
        "status": f"search {found.status}",
        "step": len(found.table.told),
        "steps": len(found.table.decisions),
        "trials": len(found.table.trials),
        "metrics": values,
        "weights_sha256": found.table.ended.weights_sha256 if found.table.ended else "",
    }


@dataclass(frozen=True)
class SearchComparison:
    """Two searches. `difference` names the first shape, decision or result that differs; '' if there is none."""

    first: StoredSearch
    second: StoredSearch
    difference: str

    @property
    def same(self) -> bool:
        return not self.difference


def compare_searches(first: StoredSearch, second: StoredSearch) -> SearchComparison:
    return SearchComparison(first, second, _first_difference(first, second))


def _first_difference(first: StoredSearch, second: StoredSearch) -> str:
    ours, theirs = canonical_rows(first.rows), canonical_rows(second.rows)
    for kind, word in (("shapes", "shape of trial"), ("decisions", "decision"), ("results", "result of decision")):
        for i, (one, other) in enumerate(zip(ours[kind], theirs[kind], strict=False)):
            if one != other:
                fields = [name for name in one if one[name] != other.get(name)]
                return f"{word} {i}: {', '.join(fields)}"
        if len(ours[kind]) != len(theirs[kind]):
            return f"{len(ours[kind])} and {len(theirs[kind])} {kind}"
    ends = [found.table.ended for found in (first, second)]
    winners = [(None, "") if end is None else (end.best, end.weights_sha256) for end in ends]
    return "" if winners[0] == winners[1] else f"winners: {winners[0][0]} and {winners[1][0]}, or their weights"
