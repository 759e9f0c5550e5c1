"""One attempt at a step, as every strategy makes it: compute, commit, and undo if it is discarded."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Protocol

from shoal.collectives.outcome import Committed, Discarded
from shoal.net.errors import LinkError
from shoal.spec.resolve import is_users_failure
from shoal.strategies.context import StepContext, StepRecorder
from shoal.tasks.user_errors import as_shoal_error


class Undoable(Protocol):
    def begin_step(self) -> None: ...

    def undo_step(self) -> None: ...


def attempt_step(
    context: StepContext,
    held: Undoable,
    *,
    compute: Callable[[], bool],
    commit: Callable[[bool], Committed | Discarded],
    alone: bool,
) -> Committed | Discarded:
    """`compute` runs this worker's lanes and returns whether it must halt; `commit` gets that flag. A discarded step
    also restores the task's state. A worker that is `alone` cannot lose a member, and makes no copy of it."""
    clock, step = time.perf_counter, context.progress.step
    task_state = None if alone else copy.deepcopy(context.task.state())
    held.begin_step()
    outcome: Committed | Discarded
    try:
        halt = compute()
    except LinkError as failure:  # sparse rows, a fragment or members of the replica could not be reached
        outcome = Discarded(str(failure))
    else:
        began = clock()
        context.activity.begin("exchange", step)
        try:
            outcome = commit(halt)
        except BaseException as failure:
            if not is_users_failure(failure):
                raise
            raise as_shoal_error(failure, "SH413", f"step {step}") from failure
        _record_times(context.stats, outcome, clock() - began)
    if isinstance(outcome, Discarded):
        held.undo_step()
        if task_state is not None:
            context.task.load_state(task_state)
    return outcome


def _record_times(stats: StepRecorder, outcome: Committed | Discarded, seconds: float) -> None:
    if isinstance(outcome, Discarded):
        stats.add_time("recovery_s", seconds)
        return
    stats.add_time("waiting_s", outcome.waited_s)
    stats.add_time("exchange_s", outcome.exchange_s)
    stats.add_time("compute_s", seconds - outcome.waited_s - outcome.exchange_s)
