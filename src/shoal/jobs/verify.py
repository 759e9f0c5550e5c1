"""`shoal verify`: run a job with several numbers of workers, and compare the weights bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from shoal.errors import error
from shoal.events.checks import Count, make_check
from shoal.fleet.forkserver import ForkServer
from shoal.jobs.coroutines import Steps, run_steps
from shoal.jobs.resolve_auto import resolve_auto_steps
from shoal.jobs.run_executor import OnEvent, RunExecutor, RunHandle, open_executor, run_to_end
from shoal.jobs.run_result import RunResult
from shoal.spec.job import MAX_WORKERS, Job, WorkersConfig
from shoal.spec.load import check_job
from shoal.spec.receipt import Receipt
from shoal.spec.run_paths import RunPaths

StepDigests = Mapping[int, Mapping[str, str]]


class TraceRow(TypedDict):
    step: Count
    tensors: dict[str, str]


_is_row: Callable[[Any], bool] = make_check(TraceRow)
"""Digests by step and tensor."""
SubmitOne = Callable[[int, str, bool], RunHandle]


@dataclass(frozen=True)
class Divergence:
    """The first step after which the states of two runs differ, and the tensors that differ, in the state's order.

    Step 0: the difference did not occur again in a second run, so the number of workers is not its cause.
    """

    runs: tuple[str, str]
    step: int = 0
    tensors: tuple[str, ...] = ()
    tensor_count: int = 0


@dataclass(frozen=True)
class VerifyResult:
    """The results by number of workers. `stopped` is a run that did not finish; then there is no verdict."""

    receipts: list[tuple[int, Receipt]]
    divergence: Divergence | None = None
    stopped: RunResult | None = None

    @property
    def same(self) -> bool:
        return len({_digests(receipt) for _, receipt in self.receipts}) == 1


def parse_worker_counts(text: str, *, where: str = "--workers") -> list[int]:
    """Parse `1,2,3`."""
    words = [word.strip() for word in text.split(",")]
    found = [int(word) for word in words if word.isdecimal() and 1 <= int(word) <= MAX_WORKERS]
    if len(found) < len(words) or len(found) < 2:
        fix = "Write two or more numbers, such as 1,2,3; the same one twice tells whether a job repeats."
        raise error("SH609", f"'{text}' is not a list of numbers of workers", where=where, fix=fix)
    return found


def verify(
    job: Job,
    workers: Sequence[int],
    *,
    runs: Path,
    on_event: OnEvent | None = None,
    fork_server: ForkServer | None = None,
) -> VerifyResult:
    """Run the job with each number of workers. If results differ, find the first step and tensor that differ."""
    with open_executor(fork_server) as executor:
        planned, _ = run_steps(resolve_auto_steps(job, executor.fork_servers))
        job = pin_job(planned, max_workers=max(workers), purpose="verify")

        def submit(number: int, name: str, trace: bool) -> RunHandle:
            return executor.submit(with_workers(job, number), runs=runs, on_event=on_event, trace=trace)

        found: list[VerifyResult] = []

        def steps(handle: RunHandle) -> Steps[RunResult]:
            found.append((yield from verify_steps(job, workers, submit)))
            return RunResult(RunPaths.at(runs), "finished")

        run_to_end(executor, executor.submit_steps(steps))
        return found[0]


def verify_steps(job: Job, workers: Sequence[int], submit: SubmitOne) -> Steps[VerifyResult]:
    """`verify` of a pinned job as steps. `submit` starts a run: with so many workers, under this name, traced or not.
    Raises the error of a run that fails."""
    check_spread(job, workers)
    done: list[tuple[int, Receipt]] = []
    for place, number in enumerate(workers, start=1):
        result = yield from _ended(submit(number, f"run-{place}", False))
        if result.receipt is None:
            return VerifyResult(done, stopped=result)
        done.append((number, result.receipt))
    first, receipt = done[0]
    other = next((number for number, one in done if _digests(one) != _digests(receipt)), None)
    if other is None or job.workers_per_replica > 1:
        return VerifyResult(done)
    traced = []
    for place, number in enumerate((first, other), start=1):
        traced.append((yield from _ended(submit(number, f"traced-{place}", True))))
        if traced[-1].receipt is None:
            return VerifyResult(done, stopped=traced[-1])
    return VerifyResult(done, _find_divergence(*(result.paths for result in traced)))


def _ended(handle: RunHandle) -> Steps[RunResult]:
    while not handle.done:
        yield ()
    result = handle.result()
    if result.error is not None:
        raise result.error
    return result


def check_spread(job: Job, workers: Sequence[int]) -> None:
    if job.workers_per_replica > 1 and len(set(workers)) > 1:
        message = "a model that is spread over other workers gives other bits: `shard` is not exact"
        fix = "Ask whether one layout repeats (--workers 2,2), or --set shard=none."
        raise error("SH110", message, where="shard", fix=fix)


def pin_job(job: Job, *, max_workers: int, purpose: str) -> Job:
    """The job with every setting pinned that its result depends on, so that only the number of workers varies."""
    if job.fold_count > 1:
        fix = "Choose one fold: --set data.split.fold=0"
        raise error("SH614", f"the job has {job.fold_count} folds", where="data.split", fix=fix)
    lanes = job.lanes or min(max(job.workers.most, max_workers), job.batch_size)
    if max_workers > lanes:
        fix = f"Ask for at most {lanes} workers, or --set lanes={max_workers}."
        raise error("SH107", f"{max_workers} workers but {lanes} lanes", where="--workers", fix=fix)
    name = f"{job.name[: 63 - len(purpose)]}-{purpose}"
    return check_job(job.model_copy(update={"name": name, "lanes": lanes, "export": []}), check_names=False)


def with_workers(job: Job, number: int) -> Job:
    return job.model_copy(update={"workers": WorkersConfig(least=number, most=number)})


def with_steps(job: Job, steps: int) -> Job:
    return job.model_copy(update={"steps": steps, "epochs": None})


def run_with_workers(
    workers: int, job: Job, executor: RunExecutor, *, runs: Path, on_event: OnEvent | None, trace: bool = False
) -> RunResult:
    """Run the job with this number of workers. Raises the run's error; a stopped run has no receipt."""
    handle = executor.submit(with_workers(job, workers), runs=runs, on_event=on_event, trace=trace)
    result = run_to_end(executor, handle)
    if result.error is not None:
        raise result.error
    return result


def _digests(receipt: Receipt) -> tuple[str, str]:
    return receipt.weights_sha256, receipt.state_sha256


def _find_divergence(one: RunPaths, other: RunPaths) -> Divergence:
    left, right = read_trace(one.trace), read_trace(other.trace)
    step, tensors = first_difference(left, right)
    return Divergence((one.name, other.name), step, tuple(tensors), len(left.get(step, {})))


def read_trace(path: Path) -> StepDigests:
    """Read a trace. If a step occurs twice it was recomputed, and the later row counts. Rows that are damaged, for
    example because their worker was killed, are passed over."""
    rows = map(_parse_row, path.read_bytes().split(b"\n"))
    return {row["step"]: row["tensors"] for row in rows if row is not None}


def _parse_row(line: bytes) -> TraceRow | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if _is_row(row) else None


def first_difference(left: StepDigests, right: StepDigests) -> tuple[int, list[str]]:
    """The first step after which tensors differ, and their names; (0, []) if there is none. A step that only one trace
    has counts if no other differs."""
    for step in [*sorted({*left} & {*right}), *sorted({*left} ^ {*right})]:
        here, there = left.get(step, {}), right.get(step, {})
        if here != there:
            return step, [name for name in {**here, **there} if here.get(name) != there.get(name)]
    return 0, []
