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

from shoal.errors import ErrorGroup, ShoalError, error
from shoal.events import Event, EventWriter, RunState, load_state
from shoal.fleet.engines.local import ForkServer
from shoal.fleet.orphans import find_orphans
from shoal.jobs import resolve_auto, run_dir
from shoal.jobs.run_driver import RunDriver, RunResult, fork_server_for
from shoal.spec.data import FoldSplitConfig
from shoal.spec.job import Job
from shoal.spec.load import load_job, save_job
from shoal.spec.receipt import Receipt, metrics_mean_and_std
from shoal.spec.run_paths import RunPaths, write_atomically

TICK_S = 0.05
OnEvent = Callable[[RunPaths, Event, RunState], None]


@dataclass(frozen=True)
class FoldsResult:
    """The merged result of a job with folds: mean and standard deviation of each metric."""

    run: str
    folds: list[RunResult] = field(default_factory=list)

    @property
    def metrics(self) -> dict[str, tuple[float, float]]:
        return metrics_mean_and_std([outcome.receipt for outcome in self.folds if outcome.receipt])

    @property
    def status(self) -> str:
        statuses = [outcome.status for outcome in self.folds]
        return next((s for s in statuses if s != "finished"), "finished")

    @property
    def error(self) -> ShoalError | None:
        return next((o.error for o in self.folds if o.error), None)


def run(
    job: Job, *, runs: Path, on_event: OnEvent | None = None, fork_server: ForkServer | None = None, trace: bool = False
) -> RunResult | FoldsResult:
    """Run a checked job in a new directory; one that leaves open how is planned first.

    Who runs many jobs may bring a nursery for all of them.

    `trace`: the workers write down every step's state in short (of a job without folds); see `jobs.verify`.
    """
    job = run_dir.resolve_init_from(job, runs)
    with contextlib.ExitStack() as stack:
        mine = stack.enter_context(
            fork_server_for(fork_server, job)
        )  # torch is being loaded while the rest is prepared
        settled, kept = resolve_auto.resolve_auto(job, fork_server=mine)
        if fork_server is None and settled.threads != job.threads:
            mine = stack.enter_context(fork_server_for(None, settled))
        paths = run_dir.create(settled, runs)
        if kept:
            kept.write(paths)
        return _execute(settled, paths, mine, on_event, trace=trace)


def resume(
    paths: RunPaths,
    *,
    overrides: Sequence[str] = (),
    on_event: OnEvent | None = None,
    fork_server: ForkServer | None = None,
) -> RunResult | FoldsResult:
    """Go on from the newest valid checkpoint; finished folds are not run again.

    `sets` change how the run goes on (`workers=2`, `shard=none`), as `path=value`, and not what it trains.
    """
    if paths.receipt.is_file():
        raise error("SH604", f"'{paths.name}' has finished", where=str(paths.root))
    job = _with_overrides(paths, overrides)
    with fork_server_for(fork_server, job) as mine:
        return _execute(job, paths, mine, on_event, changed=bool(overrides))


def _with_overrides(paths: RunPaths, overrides: Sequence[str]) -> Job:
    """The run's job with these fields changed. SH609 if it would train something else, or its workers live on."""
    job = load_job(paths.job, check_names=False)
    if not overrides:
        return job
    changed = load_job(paths.job, overrides=[f"lanes={job.lane_count}", *overrides], check_names=False)
    if changed.resume_compatibility_sha256() != job.resume_compatibility_sha256():
        fix = "Change how it goes on (workers, shard, engine, checkpoint), or start a new run with `init_from`."
        where = " ".join(["--set", ", ".join(_identity_overrides(paths, job, overrides))]).strip()
        raise error("SH609", "a run that has begun cannot train something else", where=where, fix=fix)
    if left := [survivor.seat.name for one in paths.folds or [paths] for survivor in find_orphans(one)]:
        fix = "Resume it without --set, which takes them over; or wait until they have left."
        raise error("SH609", f"{', '.join(left)} of the run live on as they are", where="--set", fix=fix)
    return changed


def _identity_overrides(paths: RunPaths, job: Job, overrides: Sequence[str]) -> list[str]:
    """The fields that would make it train something else, as far as each can be changed by itself."""
    found = []
    for one in overrides:
        with contextlib.suppress(ErrorGroup):
            alone = load_job(paths.job, overrides=[f"lanes={job.lane_count}", one], check_names=False)
            found += (
                [one.partition("=")[0].strip()]
                if alone.resume_compatibility_sha256() != job.resume_compatibility_sha256()
                else []
            )
    return found


def _execute(
    job: Job,
    paths: RunPaths,
    fork_server: ForkServer,
    on_event: OnEvent | None,
    *,
    trace: bool = False,
    changed: bool = False,
) -> RunResult | FoldsResult:
    with run_dir.driver_lock(paths):
        if changed:
            save_job(job, paths.job)
        if job.fold_count == 1:
            return _execute_all(
                {paths: _driver_factory(job, paths, fork_server, on_event, trace=trace)}, max_parallel=1
            )[paths]
        return _execute_folds(job, paths, fork_server, on_event)


def _driver_factory(
    job: Job, paths: RunPaths, fork_server: ForkServer, on_event: OnEvent | None, *, trace: bool = False
) -> Callable[[], RunDriver]:
    watch = None if on_event is None else lambda event, picture: on_event(paths, event, picture)
    return lambda: RunDriver(job, paths, fork_server, on_event=watch, trace=trace)


def _execute_folds(job: Job, paths: RunPaths, fork_server: ForkServer, on_event: OnEvent | None) -> FoldsResult:
    split = job.data.split
    assert isinstance(split, FoldSplitConfig)
    stream = EventWriter(paths.events, "driver")
    stream.emit("run_started", run=paths.name)
    done: dict[RunPaths, RunResult] = {}
    waiting: dict[RunPaths, Callable[[], RunDriver]] = {}
    folds = [paths.fold(number) for number in range(split.folds)]
    for number, fold_paths in enumerate(folds):
        if fold_paths.receipt.is_file():
            receipt = Receipt.model_validate_json(fold_paths.receipt.read_text(encoding="utf-8"))
            done[fold_paths] = RunResult(fold_paths, "finished", receipt=receipt)
            continue
        one = job.model_copy(
            update={
                "data": job.data.model_copy(update={"split": split.model_copy(update={"fold": number})}),
            }
        )
        fold_paths.root.mkdir(exist_ok=True)
        save_job(one, fold_paths.job)
        waiting[fold_paths] = _driver_factory(one, fold_paths, fork_server, on_event)
    done |= _execute_all(waiting, max_parallel=split.parallel)
    summary = FoldsResult(paths.name, [done[one] for one in folds if one in done])
    if summary.status == "finished":
        write_atomically(paths.receipt, json.dumps(folds_receipt(summary), indent=2) + "\n")
    stream.emit("run_ended", status=summary.status)
    stream.close()
    return summary


def folds_receipt(summary: FoldsResult) -> dict[str, Any]:
    """The receipt of a job with folds."""
    return {
        "run": summary.run,
        "folds": [o.receipt.model_dump(mode="json") for o in summary.folds if o.receipt],
        "metrics": {name: {"mean": mean, "std": std} for name, (mean, std) in summary.metrics.items()},
    }


def _execute_all(
    driver_factories: Mapping[RunPaths, Callable[[], RunDriver]], *, max_parallel: int
) -> dict[RunPaths, RunResult]:
    """Up to `parallel` runs at a time, in order. After a stop or a failure no further run is started.

    After a stop, those that were not started count as stopped too.
    """
    waiting = dict(driver_factories)
    active: dict[RunPaths, RunDriver] = {}
    outcomes: dict[RunPaths, RunResult] = {}
    with catch_stop_signals() as asked:
        try:
            while waiting or active:
                while waiting and len(active) < max_parallel and not asked and not _any_failed(outcomes):
                    paths = next(iter(waiting))
                    active[paths] = waiting.pop(paths)()
                    active[paths].start()
                if not active:
                    break
                wait({fd for one in active.values() for fd in one.filenos()}, TICK_S)
                for paths, one in list(active.items()):
                    if one.stop_requested and not asked:
                        asked.append(one.stop_requested)
                    if asked:
                        one.stop(asked[0])
                    outcome = one.tick(0)
                    if outcome is not None:
                        outcomes[paths] = outcome
                        del active[paths]
        finally:
            for one in active.values():
                one.close()
    return outcomes | {paths: RunResult(paths, why) for why in asked for paths in waiting}


def _any_failed(results: Mapping[RunPaths, RunResult]) -> bool:
    return any(outcome.status != "finished" for outcome in results.values())


@contextlib.contextmanager
def catch_stop_signals() -> Iterator[list[str]]:
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


def load_run_state(paths: RunPaths) -> RunState:
    """A run as its stream tells it, and whether a driver is still there."""
    state = load_state(paths.events, paths.state_snapshot)
    state.status = run_dir.current_status(state.status, paths)
    return state
