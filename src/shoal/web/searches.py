"""Routes about searches. The plan of a search is replayed when its journal has changed, for at most a twentieth of the
time of one core."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from pydantic import Field

from shoal.errors import error
from shoal.spec.base import Spec
from shoal.spec.run_paths import RunPaths
from shoal.web import work_answers as answers
from shoal.web.table import Call

if TYPE_CHECKING:  # it loads numpy, which the start of the server does without
    from shoal.jobs.search.summary import StoredSearch
    from shoal.jobs.search.table import TrialEntry

IS_SEARCH = "search "
SHARE_OF_TIME = 20.0
"""A search is read again after this many times what the last reading took."""
NOT_REPLAYED = "this version would decide otherwise: history, front and importance cannot be shown"


class TrialsQuery(Spec):
    limit: int = Field(200, ge=1, le=5000)


class FollowedSearch:
    """A search as it was read last."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._seen: tuple[Any, ...] = ()
        self._found: StoredSearch | None = None
        self._not_before_s = 0.0

    def catch_up(self) -> StoredSearch:
        from shoal.jobs import run_dir
        from shoal.jobs.search.search_dir import SearchPaths
        from shoal.jobs.search.summary import read_search

        journal = self._paths.search_journal.stat()
        seen = journal.st_ino, journal.st_size, journal.st_mtime_ns, run_dir.is_driven(self._paths)
        if self._found is None or (seen != self._seen and time.monotonic() >= self._not_before_s):
            began_s = time.monotonic()
            self._found = read_search(SearchPaths(self._paths))
            _ = self._found.summary
            self._not_before_s = time.monotonic() + SHARE_OF_TIME * (time.monotonic() - began_s)
            self._seen = seen
        return self._found


def list_searches(call: Call) -> answers.SearchList:
    rows = [row for row in call.site.rows() if row["status"].startswith(IS_SEARCH) and call.identity.sees(row["run"])]
    rows.sort(key=lambda row: (-(row["started_t"] or 0), row["run"]))
    return answers.SearchList(
        rows=[
            answers.SearchRow(
                run=row["run"],
                status=row["status"].removeprefix(IS_SEARCH),
                told=row["step"],
                decided=row["steps"],
                metrics=row["metrics"],
                started_t=row["started_t"],
            )
            for row in rows
        ]
    )


def show_search(call: Call) -> answers.SearchPage:
    if not call.paths.search_journal.is_file():
        raise error("SH632", f"'{call.paths.name}' is a run", fix="`shoal runs` lists runs and searches.")
    with call.site.searches.use(call.paths) as followed:
        return make_page(followed.catch_up(), call.names["run"], limit=call.query.limit)


def make_page(found: StoredSearch, name: str, *, limit: int) -> answers.SearchPage:
    summary = found.summary
    ranks = {trial.number: rank for rank, trial in enumerate(found.ranked, 1)}
    rest = [trial for trial in found.table.trials.values() if trial.number not in ranks]
    front = () if summary is None else summary.front
    states = [found.judge.phase(trial) for trial in found.table.trials.values()]
    return answers.SearchPage(
        run=name,
        status=found.status,
        goals=[answers.SearchGoal(metric=one.metric, sign=one.sign) for one in found.judge.objectives],
        best=None if found.best is None else found.best.number,
        spent=round(found.table.spent, 4),
        decisions=len(found.table.decisions),
        starts=found.table.starts,
        total=len(states),
        counts={state: states.count(state) for state in dict.fromkeys(states)},
        trials=[
            _trial_row(found, trial, name=name, rank=ranks.get(trial.number), on_front=trial.number in front)
            for trial in [*found.ranked, *rest][:limit]
        ],
        history=[
            answers.BestRow(trainings=one.trainings, trial=one.trial, value=one.value)
            for one in (() if summary is None else summary.history)
        ],
        importance=found.importance,
        front=list(front),
        receipt=None if found.receipt is None else json.loads(found.receipt.model_dump_json()),
        note=NOT_REPLAYED if summary is None else "",
    )


def _trial_row(
    found: StoredSearch, trial: TrialEntry, *, name: str, rank: int | None, on_front: bool
) -> answers.TrialRow:
    return answers.TrialRow(
        trial=trial.number,
        state=found.judge.phase(trial),
        rank=rank,
        on_front=on_front,
        unit=trial.unit,
        units=trial.units,
        values={metric: value for metric, value in found.judge.values(trial).items() if value == value},
        changes=dict(trial.changes),
        failure=trial.failure,
        why=trial.why,
        copy_of=None if trial.copy_of is None else list(trial.copy_of),
        run=f"{name}~trial-{trial.number}" if found.paths.trial(trial.number).job.is_file() else "",
    )
