"""A verification in a queue: a directory with a run for each number of workers, and the verdict when all have ended."""

from __future__ import annotations

import contextlib
from pathlib import Path

from pydantic import ValidationError

from shoal.errors import ShoalError, error
from shoal.events import EventWriter
from shoal.jobs import run_dir
from shoal.jobs.coroutines import Steps
from shoal.jobs.resolve_auto import resolve_auto_steps
from shoal.jobs.resume import load_moved
from shoal.jobs.run_executor import OnEvent, RunExecutor, RunHandle
from shoal.jobs.run_result import RunResult
from shoal.jobs.verify import Divergence, VerifyResult, check_spread, pin_job, verify_steps, with_workers
from shoal.plan.queueing.work import VerifyWork
from shoal.spec.base import Spec
from shoal.spec.job import Job
from shoal.spec.receipt import read_receipt_file
from shoal.spec.run_paths import RunPaths, write_atomically

VERDICT = "verify.json"
DIFFERS = "differs"
"""The status of a verification whose runs differ."""


class KeptVerdict(Spec):
    """Kept beside the runs `run-1`, `run-2`, …, which have one of these numbers of workers each."""

    workers: tuple[int, ...]
    divergence: Divergence | None = None


def check_verifiable(job: Job, work: VerifyWork) -> None:
    """Raise what is wrong before anything is written."""
    check_spread(pin_job(job, max_workers=max(work.workers), purpose="verify"), work.workers)


def verification_steps(
    handle: RunHandle, executor: RunExecutor, job: Job, work: VerifyWork, paths: RunPaths, on_event: OnEvent
) -> Steps[RunResult]:
    """Begin in a reserved directory, or go on there. Runs that have ended are not run again."""
    handle.paths = paths
    if not paths.job.is_file():
        planned, _ = yield from resolve_auto_steps(job, executor.fork_servers)
        pinned = pin_job(planned, max_workers=max(work.workers), purpose="verify")
        job = pinned.model_copy(update={"name": job.name})
        run_dir.create(job, paths.root.parent, reserved=paths)
    with run_dir.driver_lock(paths), contextlib.closing(EventWriter(paths.events, "driver")) as stream:
        job = load_moved(job, paths)
        stream.emit("run_started", run=paths.name)
        try:
            result = yield from _compare(handle, executor, job, work, paths, on_event)
        except ShoalError as failure:
            result = RunResult(paths, "failed", error=failure)
        stream.emit("run_ended", status=result.status)
        return result


def _compare(
    handle: RunHandle, executor: RunExecutor, job: Job, work: VerifyWork, paths: RunPaths, on_event: OnEvent
) -> Steps[RunResult]:
    active: list[RunHandle] = []

    def submit(number: int, name: str, trace: bool) -> RunHandle:
        where = RunPaths(paths.root / name)
        active.append(executor.submit_or_resume(with_workers(job, number), where, on_event=on_event, trace=trace))
        return active[-1]

    steps = verify_steps(job, work.workers, submit)
    try:
        while True:
            for one in active:
                one.stop(handle.stop_reason)
            try:
                filenos = next(steps)
            except StopIteration as end:
                return _conclude(paths, work, end.value)
            yield filenos
    finally:
        for one in active:
            executor.break_off(one)


def _conclude(paths: RunPaths, work: VerifyWork, found: VerifyResult) -> RunResult:
    if found.stopped is not None:
        return RunResult(paths, found.stopped.status)
    verdict = KeptVerdict(workers=work.workers, divergence=found.divergence)
    write_atomically(paths.root / VERDICT, verdict.model_dump_json(indent=2) + "\n")
    ended = ended_verification(paths)
    assert ended is not None
    return ended


def ended_verification(paths: RunPaths) -> RunResult | None:
    """The result of a verification with a verdict; None if it has none."""
    if (found := read_verdict(paths.root)) is None:
        return None
    if found.same:
        return RunResult(paths, "finished")
    numbers = ", ".join(str(number) for number, _ in found.receipts)
    failure = error("SH636", f"the weights differ between {numbers} workers", where=paths.name)
    return RunResult(paths, DIFFERS, error=failure)


def read_verdict(root: Path) -> VerifyResult | None:
    """The verdict of a directory, with the receipts of its runs; None if it is that of something else, or if it goes
    on."""
    try:
        kept = KeptVerdict.model_validate_json((root / VERDICT).read_bytes())
    except (OSError, ValidationError):
        return None
    receipts = [
        read_receipt_file(root / f"run-{place}" / "receipt.json").own for place in range(1, len(kept.workers) + 1)
    ]
    done = [(number, one) for number, one in zip(kept.workers, receipts, strict=True) if one is not None]
    return VerifyResult(done, kept.divergence) if len(done) == len(receipts) else None
