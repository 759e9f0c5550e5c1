"""Results from rows of committed steps: pure functions, the same for every side."""

from __future__ import annotations

import itertools
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Commit:
    """A worker committed this step at this time. `worker` is a slot that a restarted process takes again."""

    t: float
    worker: int
    step: int
    sample_ids: Sequence[int] = ()
    pid: int = 0

    @classmethod
    def from_line(cls, line: str) -> Commit:
        return cls(**json.loads(line))


@dataclass(frozen=True)
class Kill:
    t: float
    worker: int


@dataclass(frozen=True)
class Trace:
    """One run: commits, kills, and why the run was given up, if it was.

    `proven`: whether the weights are those of an undisturbed run. None for sides that do not claim that; there the rows
    of a worker describe its own work.
    """

    commits: list[Commit] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    failure: str = ""
    proven: bool | None = None


@dataclass(frozen=True)
class Replay:
    """The commits that the final weights contain, and the number of repeated steps."""

    kept: list[Commit]
    steps_redone: int


def replay(commits: Iterable[Commit]) -> Replay:
    """Follow a run through its returns to a checkpoint.

    A worker that commits a step again has gone back. The first worker that does so voids all commits from that step on;
    the other workers follow it into the new attempt. Processes that did not exist at its last commit belong to the new
    attempt too, because they may have started it before that worker.
    """
    kept: list[Commit] = []
    last: dict[int, Commit] = {}
    born: dict[int, float] = {}
    attempts: dict[int, int] = {}
    attempt = redone = 0
    for commit in sorted(commits, key=lambda one: one.t):
        worker, step = commit.worker, commit.step
        born.setdefault(commit.pid, commit.t)
        if worker in last and step <= last[worker].step and attempts[worker] == attempt:
            redone += max(one.step for one in kept) - step + 1
            kept = [one for one in kept if one.step < step or born[one.pid] > last[worker].t]
            attempt += 1
        last[worker], attempts[worker] = commit, attempt
        kept.append(commit)
    return Replay(kept, redone)


def step_s(commits: Iterable[Commit]) -> float:
    """Median time of a step. Recoveries are a few gaps among hundreds and do not affect it."""
    by_worker: dict[int, list[Commit]] = {}
    for commit in sorted(commits, key=lambda one: one.t):
        by_worker.setdefault(commit.worker, []).append(commit)
    pairs = (pair for rows in by_worker.values() for pair in itertools.pairwise(rows))
    gaps = [after.t - before.t for before, after in pairs if after.step == before.step + 1]
    return statistics.median(gaps)


def recovery_s(commits: Iterable[Commit], kill: Kill, *, step_s: float) -> float | None:
    """Seconds from the kill to the next committed step, minus the usual time of a step.

    A step in progress may still be committed just after the kill, with the data that the dead worker had sent; that is
    not a recovery. Training has recovered when the step after it is committed, or when a worker commits an old step
    again. None if neither happens.
    """
    ordered = sorted(commits, key=lambda one: one.t)
    before = [one for one in ordered if one.t <= kill.t]
    reached = max(before, key=lambda one: (one.step, -one.t))
    last = {one.worker: one.step for one in before}
    for one in ordered[len(before) :]:
        if one.step > reached.step + 1:
            return max(0.0, one.t - reached.t - (one.step - reached.step) * step_s)
        if one.step <= last.get(one.worker, -1):
            return max(0.0, one.t - kill.t - step_s)
        last[one.worker] = one.step
    return None


def lost_and_repeated(kept: Iterable[Commit], *, samples: int, steps_per_epoch: int) -> tuple[int, int]:
    """Over the complete epochs: number of samples that were missed, and of samples that were repeated.

    The rows of one step may name a sample more than once (a worker may report the samples of all workers): it counts
    once.
    """
    kept = list(kept)
    epochs = (max((one.step for one in kept), default=-1) + 1) // steps_per_epoch
    visits = {(one.step, sample) for one in kept if one.step < epochs * steps_per_epoch for sample in one.sample_ids}
    seen = Counter(sample for _, sample in visits)
    lost = sum(max(0, epochs - seen[sample]) for sample in range(samples))
    repeated = sum(max(0, count - epochs) for count in seen.values())
    return lost, repeated


def summary(rival: str, traces: Sequence[Trace], *, samples: int, steps_per_epoch: int) -> dict[str, Any]:
    """The result of one side over all of its runs."""
    found = [second for trace in traces for second in recoveries(trace)]
    replays = [replay(trace.commits) for trace in traces]
    tallies = [lost_and_repeated(one.kept, samples=samples, steps_per_epoch=steps_per_epoch) for one in replays]
    doubtful = any(trace.proven is False for trace in traces)  # its rows tell what the weights should hold
    failures = [trace.failure for trace in traces if trace.failure]
    return {
        "rival": rival,
        "kills": sum(len(trace.kills) for trace in traces),
        "median_s": statistics.median(found) if found else None,
        "worst_s": max(found, default=None),
        "all": found,
        "step_s": statistics.median(step_s(trace.commits) for trace in traces),
        "steps_redone": sum(one.steps_redone for one in replays),
        "samples_lost": None if doubtful else sum(lost for lost, _ in tallies),
        "samples_repeated": None if doubtful else sum(repeated for _, repeated in tallies),
        "same_weights": _verdict(traces),
        "failed_to_come_back": len(failures),
        "failures": failures,
    }


def _verdict(traces: Sequence[Trace]) -> str:
    claims = [trace.proven for trace in traces if trace.proven is not None]
    return ("yes" if all(claims) else "no") if claims else ""


def recoveries(trace: Trace) -> list[float]:
    normal = step_s(trace.commits)
    found = (recovery_s(trace.commits, kill, step_s=normal) for kill in trace.kills)
    return [seconds for seconds in found if seconds is not None]
