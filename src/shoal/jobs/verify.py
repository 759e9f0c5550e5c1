"""Is it true? The same job with other numbers of workers, and whether the weights are the same to the bit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import error
from shoal.fleet.engines.local import Nursery
from shoal.jobs import drive
from shoal.jobs.drive import Look
from shoal.jobs.run import Outcome, borrowed
from shoal.jobs.settling import settle
from shoal.spec.job import MOST_WORKERS, Job, Workers
from shoal.spec.load import check_job
from shoal.spec.paths import RunPaths
from shoal.spec.receipt import Receipt

Trace = Mapping[int, Mapping[str, str]]
"""Steps to tensors to digests."""


@dataclass(frozen=True)
class Parting:
    """Where two runs part: the first step after which their states differ, and which tensors do, in the state's order.

    Step 0: they did not part when they were run again, so that it is not the number of workers that counts.
    """

    runs: tuple[str, str]
    step: int = 0
    tensors: tuple[str, ...] = ()
    of: int = 0


@dataclass(frozen=True)
class Verdict:
    """What each number of workers gave. `stopped` holds a run that did not finish; nothing is known then."""

    receipts: list[tuple[int, Receipt]]
    parting: Parting | None = None
    stopped: Outcome | None = None

    @property
    def same(self) -> bool:
        return len({_result(receipt) for _, receipt in self.receipts}) == 1


def numbers(text: str) -> list[int]:
    """`1,2,3` as numbers of workers."""
    words = [word.strip() for word in text.split(",")]
    found = [int(word) for word in words if word.isdecimal() and 1 <= int(word) <= MOST_WORKERS]
    if len(found) < len(words) or len(found) < 2:
        fix = "Write two or more numbers, such as 1,2,3; the same one twice tells whether a job repeats."
        raise error("SH609", f"'{text}' is not a list of numbers of workers", where="--workers", fix=fix)
    return found


def verify(
    job: Job, workers: Sequence[int], *, runs: Path, look: Look | None = None, nursery: Nursery | None = None
) -> Verdict:
    """Run the job with each number of workers; where results differ, find the step and the tensor."""
    job = fixed(settle(job, nursery=nursery)[0], most=max(workers), purpose="verify")
    if job.ways > 1 and len(set(workers)) > 1:
        message = "a model that is spread over other workers gives other bits: `shard` is not exact"
        fix = "Ask whether one layout repeats (--workers 2,2), or --set shard=none."
        raise error("SH110", message, where="shard", fix=fix)
    with borrowed(nursery, job) as mine:
        done: list[tuple[int, Receipt]] = []
        for number in workers:
            outcome = run_with(number, job, runs=runs, look=look, nursery=mine)
            if outcome.receipt is None:
                return Verdict(done, stopped=outcome)
            done.append((number, outcome.receipt))
        first, receipt = done[0]
        other = next((number for number, one in done if _result(one) != _result(receipt)), None)
        if other is None or job.ways > 1:
            return Verdict(done)
        traced = [run_with(number, job, runs=runs, look=look, nursery=mine, trace=True) for number in (first, other)]
        stopped = next((outcome for outcome in traced if outcome.receipt is None), None)
        return Verdict(done, None if stopped else _parting(*(outcome.paths for outcome in traced)), stopped)


def fixed(job: Job, *, most: int, purpose: str) -> Job:
    """The job with everything settled that its result depends on, so that only the workers differ from run to run."""
    if job.fold_count > 1:
        fix = "Choose one fold: --set data.split.fold=0"
        raise error("SH614", f"the job has {job.fold_count} folds", where="data.split", fix=fix)
    lanes = job.lanes or min(max(job.workers.most, most), job.batch_size)
    if most > lanes:
        fix = f"Ask for at most {lanes} workers, or --set lanes={most}."
        raise error("SH107", f"{most} workers but {lanes} lanes", where="--workers", fix=fix)
    name = f"{job.name[: 63 - len(purpose)]}-{purpose}"
    return check_job(job.model_copy(update={"name": name, "lanes": lanes, "export": []}), check_names=False)


def with_workers(job: Job, number: int) -> Job:
    return job.model_copy(update={"workers": Workers(least=number, most=number)})


def with_steps(job: Job, steps: int) -> Job:
    return job.model_copy(update={"steps": steps, "epochs": None})


def run_with(
    workers: int, job: Job, *, runs: Path, look: Look | None, nursery: Nursery, trace: bool = False
) -> Outcome:
    """The job with so many workers. Raises what went wrong; a run that was stopped has no receipt."""
    outcome = drive.run(with_workers(job, workers), runs=runs, look=look, nursery=nursery, trace=trace)
    assert isinstance(outcome, Outcome)
    if outcome.error is not None:
        raise outcome.error
    return outcome


def _result(receipt: Receipt) -> tuple[str, str]:
    return receipt.weights_sha256, receipt.state_sha256


def _parting(one: RunPaths, other: RunPaths) -> Parting:
    left, right = read_trace(one.trace), read_trace(other.trace)
    step, tensors = first_difference(left, right)
    return Parting((one.name, other.name), step, tuple(tensors), len(left.get(step, {})))


def read_trace(path: Path) -> Trace:
    """A step that stands there twice was computed again; the later row counts."""
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return {row["step"]: row["tensors"] for row in rows}


def first_difference(left: Trace, right: Trace) -> tuple[int, list[str]]:
    """The first step after which something differs, and what; (0, []) if nothing does."""
    for step in sorted({*left, *right}):
        here, there = left.get(step, {}), right.get(step, {})
        if here != there:
            return step, [name for name in {**here, **there} if here.get(name) != there.get(name)]
    return 0, []
