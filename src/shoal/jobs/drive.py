"""Driving whole jobs: one run, or the folds of one, side by side; Ctrl-C and SIGTERM ask all of them to leave."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import Any

from shoal.errors import Problems, ShoalError, error
from shoal.events import Event, Picture, Reader, Stream, fold
from shoal.fleet.engines.local import Nursery
from shoal.fleet.survivors import survivors
from shoal.jobs import directory, settling
from shoal.jobs.run import Outcome, Run, borrowed
from shoal.spec.data import FoldSplit
from shoal.spec.job import Job
from shoal.spec.load import load_job, save_job
from shoal.spec.paths import RunPaths, write_atomically
from shoal.spec.receipt import Receipt, spread

TICK_S = 0.05
Look = Callable[[RunPaths, Event, Picture], None]


@dataclass(frozen=True)
class Summary:
    """The merged result of a job with folds: mean and standard deviation of each metric."""

    run: str
    folds: list[Outcome] = field(default_factory=list)

    @property
    def metrics(self) -> dict[str, tuple[float, float]]:
        return spread([outcome.receipt for outcome in self.folds if outcome.receipt])

    @property
    def status(self) -> str:
        statuses = [outcome.status for outcome in self.folds]
        return next((s for s in statuses if s != "finished"), "finished")

    @property
    def error(self) -> ShoalError | None:
        return next((o.error for o in self.folds if o.error), None)


def run(
    job: Job, *, runs: Path, look: Look | None = None, nursery: Nursery | None = None, trace: bool = False
) -> Outcome | Summary:
    """Run a checked job in a new directory; one that leaves open how is planned first.

    Who runs many jobs may bring a nursery for all of them.

    `trace`: the workers write down every step's state in short (of a job without folds); see `jobs.verify`.
    """
    job = directory.with_its_start(job, runs)
    with contextlib.ExitStack() as stack:
        mine = stack.enter_context(borrowed(nursery, job))  # torch is being loaded while the rest is prepared
        settled, kept = settling.settle(job, nursery=mine)
        if nursery is None and settled.threads != job.threads:
            mine = stack.enter_context(borrowed(None, settled))
        paths = directory.create(settled, runs)
        if kept:
            kept.write(paths)
        return _drive(settled, paths, mine, look, trace=trace)


def resume(
    paths: RunPaths, *, sets: Sequence[str] = (), look: Look | None = None, nursery: Nursery | None = None
) -> Outcome | Summary:
    """Go on from the newest valid checkpoint; finished folds are not run again.

    `sets` change how the run goes on (`workers=2`, `shard=none`), as `path=value`, and not what it trains.
    """
    if paths.receipt.is_file():
        raise error("SH604", f"'{paths.name}' has finished", where=str(paths.root))
    job = _changed(paths, sets)
    with borrowed(nursery, job) as mine:
        return _drive(job, paths, mine, look, changed=bool(sets))


def _changed(paths: RunPaths, sets: Sequence[str]) -> Job:
    """The run's job with these fields changed. SH609 if it would train something else, or its workers live on."""
    job = load_job(paths.job, check_names=False)
    if not sets:
        return job
    changed = load_job(paths.job, overrides=[f"lanes={job.lane_count}", *sets], check_names=False)
    if changed.trunk_sha256() != job.trunk_sha256():
        fix = "Change how it goes on (workers, shard, engine, checkpoint), or start a new run with `init_from`."
        where = " ".join(["--set", ", ".join(_other(paths, job, sets))]).strip()
        raise error("SH609", "a run that has begun cannot train something else", where=where, fix=fix)
    if left := [survivor.seat.name for one in paths.folds or [paths] for survivor in survivors(one)]:
        fix = "Resume it without --set, which takes them over; or wait until they have left."
        raise error("SH609", f"{', '.join(left)} of the run live on as they are", where="--set", fix=fix)
    return changed


def _other(paths: RunPaths, job: Job, sets: Sequence[str]) -> list[str]:
    """The fields that would make it train something else, as far as each can be changed by itself."""
    found = []
    for one in sets:
        with contextlib.suppress(Problems):
            alone = load_job(paths.job, overrides=[f"lanes={job.lane_count}", one], check_names=False)
            found += [one.partition("=")[0].strip()] if alone.trunk_sha256() != job.trunk_sha256() else []
    return found


def _drive(
    job: Job, paths: RunPaths, nursery: Nursery, look: Look | None, *, trace: bool = False, changed: bool = False
) -> Outcome | Summary:
    with directory.locked(paths):
        if changed:
            save_job(job, paths.job)
        if job.fold_count == 1:
            return _drive_all({paths: _prepared(job, paths, nursery, look, trace=trace)}, parallel=1)[paths]
        return _drive_folds(job, paths, nursery, look)


def _prepared(
    job: Job, paths: RunPaths, nursery: Nursery, look: Look | None, *, trace: bool = False
) -> Callable[[], Run]:
    watch = None if look is None else lambda event, picture: look(paths, event, picture)
    return lambda: Run(job, paths, nursery, watch=watch, trace=trace)


def _drive_folds(job: Job, paths: RunPaths, nursery: Nursery, look: Look | None) -> Summary:
    split = job.data.split
    assert isinstance(split, FoldSplit)
    stream = Stream(paths.events, "driver")
    stream.emit("run_started", run=paths.name)
    done: dict[RunPaths, Outcome] = {}
    waiting: dict[RunPaths, Callable[[], Run]] = {}
    folds = [paths.fold(number) for number in range(split.folds)]
    for number, fold_paths in enumerate(folds):
        if fold_paths.receipt.is_file():
            receipt = Receipt.model_validate_json(fold_paths.receipt.read_text(encoding="utf-8"))
            done[fold_paths] = Outcome(fold_paths, "finished", receipt=receipt)
            continue
        one = job.model_copy(
            update={
                "data": job.data.model_copy(update={"split": split.model_copy(update={"fold": number})}),
            }
        )
        fold_paths.root.mkdir(exist_ok=True)
        save_job(one, fold_paths.job)
        waiting[fold_paths] = _prepared(one, fold_paths, nursery, look)
    done |= _drive_all(waiting, parallel=split.parallel)
    summary = Summary(paths.name, [done[one] for one in folds if one in done])
    if summary.status == "finished":
        write_atomically(paths.receipt, json.dumps(merged(summary), indent=2) + "\n")
    stream.emit("run_ended", status=summary.status)
    stream.close()
    return summary


def merged(summary: Summary) -> dict[str, Any]:
    """The receipt of a job with folds."""
    return {
        "run": summary.run,
        "folds": [o.receipt.model_dump(mode="json") for o in summary.folds if o.receipt],
        "metrics": {name: {"mean": mean, "std": std} for name, (mean, std) in summary.metrics.items()},
    }


def _drive_all(starts: Mapping[RunPaths, Callable[[], Run]], *, parallel: int) -> dict[RunPaths, Outcome]:
    """Up to `parallel` runs at a time, in order. After a stop or a failure no further run is started.

    After a stop, those that were not started count as stopped too.
    """
    waiting = dict(starts)
    active: dict[RunPaths, Run] = {}
    outcomes: dict[RunPaths, Outcome] = {}
    with asked_to_stop() as asked:
        try:
            while waiting or active:
                while waiting and len(active) < parallel and not asked and not _spoiled(outcomes):
                    paths = next(iter(waiting))
                    active[paths] = waiting.pop(paths)()
                    active[paths].start()
                if not active:
                    break
                wait({fd for one in active.values() for fd in one.filenos()}, TICK_S)
                for paths, one in list(active.items()):
                    if one.asked_to_stop and not asked:
                        asked.append(one.asked_to_stop)
                    if asked:
                        one.stop(asked[0])
                    outcome = one.tick(0)
                    if outcome is not None:
                        outcomes[paths] = outcome
                        del active[paths]
        finally:
            for one in active.values():
                one.close()
    return outcomes | {paths: Outcome(paths, why) for why in asked for paths in waiting}


def _spoiled(outcomes: Mapping[RunPaths, Outcome]) -> bool:
    return any(outcome.status != "finished" for outcome in outcomes.values())


@contextlib.contextmanager
def asked_to_stop() -> Iterator[list[str]]:
    """A list that fills when the user asks to stop; asking twice ends at once."""
    asked: list[str] = []
    names = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}

    def note(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(names[signal.Signals(number)])

    try:
        old = {number: signal.signal(number, note) for number in names}
    except ValueError:  # not the main thread: somebody else handles signals
        yield asked
        return
    try:
        yield asked
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def picture_of(paths: RunPaths) -> Picture:
    """A run as its stream tells it, and whether somebody still drives it."""
    picture = fold(Reader(paths.events).new())
    if picture.status in ("starting", "training", "created") and not directory.is_driven(paths.whole):
        picture.status = "broken off"
    return picture
