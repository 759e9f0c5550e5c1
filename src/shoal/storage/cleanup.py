"""Cleaning up: a plan of what would go, and its application by its hash, so that nothing else goes.

What goes moves to the trash. Runs that are driven or have tags never go. Checkpoints go only if the run has finished
and its model is exported. Instead of going, finished runs may be compacted, which loses nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from shoal.errors import ShoalError, error
from shoal.events.checks import Count, make_check
from shoal.events.packed_file import has_content, size_of_content, stat_content
from shoal.jobs import run_dir, run_index
from shoal.jobs.resume import has_finished
from shoal.spec.base import parse_size
from shoal.spec.load import load_run_job
from shoal.spec.run_paths import RunPaths, write_atomically
from shoal.storage.compaction import Compaction, compact_run, estimate_freed_bytes, is_over
from shoal.storage.disk_usage import all_usage, directory_bytes
from shoal.storage.tags import require_tags
from shoal.storage.trash import TrashEntry, move_to_trash

PLANS = ".trash/plans"
COMPACT = "compact"
PARTS = ("", "checkpoints", COMPACT)
"""The whole run goes, its checkpoints go, or it is compacted."""
MAX_PLAN_BYTES = 1 << 26
DAY_S = 86400.0


@dataclass(frozen=True)
class CleanupRules:
    """Which runs may go. `keep_newest` and `keep_best` are of each job; the best are those by the job's `best`.
    `total_bytes`: only as many go, the oldest first, as bring all runs below it. `statuses`: only runs with one of
    these; empty for all. `part`: what happens, see `PARTS`."""

    older_than_s: float = 0.0
    keep_newest: int = 0
    keep_best: int = 0
    total_bytes: int | None = None
    statuses: tuple[str, ...] = ()
    part: str = ""


def read_rules(
    *, days: float, keep: str, total: str, status: str, checkpoints: bool, compact: bool = False
) -> CleanupRules:
    """Rules as a user writes them: keep `2`, or `newest=2,best=1`; total `200 GB`; status `failed,stopped`. SH609 if
    one of them is something else."""
    numbers = {"newest": 0, "best": 0}
    for word in filter(None, keep.split(",")):
        kind, _, number = word.strip().rpartition("=")
        if (kind or "newest") not in numbers or not number.isdecimal() or len(number) > 6:
            raise error("SH609", f"'{word}' is not a rule", where="keep", fix="Write newest=2,best=1.")
        numbers[kind or "newest"] = int(number)
    try:
        most = parse_size(total) if total else None
    except ValueError as failure:
        raise error("SH609", f"'{total}' is not a size", where="total", fix=str(failure)) from None
    if checkpoints and compact:
        raise error("SH609", "checkpoints go, or runs are compacted", fix="Make a plan for each.")
    part = "checkpoints" if checkpoints else COMPACT if compact else ""
    statuses = tuple(one.strip() for one in status.split(",") if one.strip())
    return CleanupRules(days * DAY_S, numbers["newest"], numbers["best"], most, statuses, part)


class PlanItem(TypedDict):
    """`job_mtime_ns` and `events_bytes` say which run was meant: one that changed meanwhile does not go."""

    run: str
    part: str
    freed_bytes: Count
    job_mtime_ns: Count
    events_bytes: Count


_is_items: Callable[[Any], bool] = make_check(list[PlanItem])


def make_plan(runs: Path, rules: CleanupRules) -> list[PlanItem]:
    tags = require_tags(runs)
    rows = {row["run"]: row for row in run_index.list_summaries(runs)}
    here = [paths for paths in run_dir.list_runs(runs) if paths.root.parent == runs.resolve()]
    found = [paths for paths in here if paths.name in rows]  # another one began after the rows were read
    protected = {name for name, own in tags.items() if own}
    for own in _by_job(found):
        protected |= {paths.name for paths in own[max(0, len(own) - rules.keep_newest) :]}
        protected |= _best(own, rows, rules.keep_best)
    chosen = [one for one in found if one.name not in protected and _may_go(one, rows[one.name], rules)]
    items = [item for item in (_item(paths, rules) for paths in chosen) if item["freed_bytes"]]
    return items if rules.total_bytes is None else _enough(items, runs, rules.total_bytes)


def _by_job(found: Sequence[RunPaths]) -> list[list[RunPaths]]:
    """`found` is ordered, the oldest first, and so is each list."""
    by_job: dict[str, list[RunPaths]] = {}
    for paths in found:
        by_job.setdefault(paths.name.rpartition("-")[0] or paths.name, []).append(paths)
    return list(by_job.values())


def _best(own: Sequence[RunPaths], rows: Mapping[str, Mapping[str, Any]], keep: int) -> set[str]:
    """The best runs of a job by the metric of its `best`. Runs whose job cannot be read, or has none, are not among
    them."""
    measured: list[tuple[float, str]] = []
    for paths in own if keep else ():
        with contextlib.suppress(ShoalError, OSError):
            best = load_run_job(paths.job).best
            value = rows[paths.name]["metrics"].get(best.metric)
            if isinstance(value, int | float) and value == value:
                measured.append((best.sign * value, paths.name))
    return {name for _, name in sorted(measured, reverse=True)[:keep]}


def _enough(items: Sequence[PlanItem], runs: Path, total_bytes: int) -> list[PlanItem]:
    """The first items that bring all runs below the total."""
    excess = sum(one.total.freed_bytes for one in all_usage(runs)) - total_bytes
    chosen: list[PlanItem] = []
    for item in items:
        if excess <= 0:
            break
        chosen.append(item)
        excess -= item["freed_bytes"]
    return chosen


def _may_go(paths: RunPaths, row: dict[str, Any], rules: CleanupRules) -> bool:
    if run_dir.is_driven(paths) or (rules.statuses and row["status"] not in rules.statuses):
        return False
    if rules.part == "checkpoints" and not _has_model(paths):
        return False
    if rules.part == COMPACT and not is_over(paths):
        return False
    return time.time() - _last_change_t(paths) >= rules.older_than_s


def _has_model(paths: RunPaths) -> bool:
    """Whether every fold has finished, and has its model."""
    return all(has_finished(one) and (one.model / "model.safetensors").is_file() for one in paths.folds or [paths])


def _last_change_t(paths: RunPaths) -> float:
    try:
        return max(stat_content(file).st_mtime for file in (paths.job, paths.events) if has_content(file))
    except (OSError, ValueError):
        return time.time()


def _item(paths: RunPaths, rules: CleanupRules) -> PlanItem:
    if rules.part == COMPACT:
        freed = estimate_freed_bytes(paths)
    else:
        freed = directory_bytes(paths.root / rules.part).freed_bytes
    mtime_ns, size = _identity(paths)
    return {"run": paths.name, "part": rules.part, "freed_bytes": freed, "job_mtime_ns": mtime_ns, "events_bytes": size}


def _identity(paths: RunPaths) -> tuple[int, int]:
    return paths.job.stat().st_mtime_ns, size_of_content(paths.events)


def plan_hash(items: Sequence[PlanItem]) -> str:
    return hashlib.sha256(json.dumps(items, sort_keys=True).encode()).hexdigest()[:16]


def save_plan(runs: Path, items: Sequence[PlanItem]) -> str:
    """Keep the plan under its hash, and return the hash."""
    directory = runs / PLANS
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    name = plan_hash(items)
    write_atomically(directory / f"{name}.json", json.dumps(items, indent=1))
    return name


@dataclass
class Applied:
    """What a plan did. `stays`: a line for each item that stays as it is because its run has changed."""

    entries: list[TrashEntry] = field(default_factory=list)
    compacted: list[Compaction] = field(default_factory=list)
    stays: list[str] = field(default_factory=list)


def apply_plan(runs: Path, name: str) -> Applied:
    """Do exactly what the plan lists. SH674 if there is no such plan, or its content has another hash."""
    if not name.isalnum() or len(name) != 16:
        raise error("SH674", f"'{name}' is not the hash of a plan")
    try:
        content = (runs / PLANS / f"{name}.json").read_bytes()[:MAX_PLAN_BYTES]
        items = json.loads(content)
    except (OSError, ValueError, RecursionError) as failure:
        raise error("SH674", f"there is no plan {name}", where=str(runs / PLANS)) from failure
    if not _is_items(items) or plan_hash(items) != name:
        raise error("SH674", f"the plan {name} was changed", where=str(runs / PLANS))
    done = Applied()
    for item in items:
        try:
            _apply(runs, item, done)
        except (ShoalError, OSError) as failure:
            done.stays.append(f"{item['run']} stays: {getattr(failure, 'message', failure)}")
    (runs / PLANS / f"{name}.json").unlink(missing_ok=True)
    return done


def _apply(runs: Path, item: PlanItem, done: Applied) -> None:
    if Path(item["run"]).name != item["run"] or item["part"] not in PARTS:
        raise error("SH674", "it is not a name")
    paths = RunPaths(runs.resolve() / item["run"])
    if require_tags(runs).get(paths.name):
        raise error("SH674", "it has tags now")
    if not paths.job.is_file() or _identity(paths) != (item["job_mtime_ns"], item["events_bytes"]):
        raise error("SH674", "it has changed since the plan was made")
    if item["part"] == COMPACT:
        done.compacted.append(compact_run(paths))
    else:
        done.entries.append(move_to_trash(paths, runs, part=item["part"]))
