"""What the end of an attempt means for its entry of the queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from functools import partial

from shoal.errors import ShoalError, describe_exception
from shoal.fleet.engines.host_use import UNREACHABLE
from shoal.jobs.run_executor import RunHandle
from shoal.jobs.run_result import RunResult
from shoal.plan.queueing import transitions
from shoal.plan.queueing.entry import QueueEntry

PUT_BACK = {
    "terminated": "the daemon was ended",
    "interrupted": "the daemon was ended",
    "down": "the daemon was ended by `shoal down`",
    "preempted": "others had to go first",
}
"""Reasons for which the daemon itself stops a run. The next turn resumes it."""
FINAL = ("SH606", "SH614", "SH636", "SH660", "SH662", "SH664", "SH665", "SH668", "SH669")
"""Errors of the work itself, among those of runs: another attempt would end in the same way."""
Settle = Callable[[QueueEntry], QueueEntry]


def settle(handle: RunHandle, *, epoch: int, lost: Sequence[str] = ()) -> Settle:
    """What the end of an attempt means for its entry. `lost`: hosts of the cluster that cannot be reached."""
    if why := waits_for_hosts(handle, lost):
        return partial(transitions.put_back, epoch=epoch, why=why)
    try:
        result = handle.result()
    except CancelledError:  # stopped while it was planned
        return partial(transitions.put_back, epoch=epoch, why="it had not begun")
    except ShoalError as failure:
        return settle_error(failure, epoch=epoch)
    except Exception as failure:
        return partial(transitions.fail, epoch=epoch, why=f"a bug in Shoal: {describe_exception(failure)}")
    return settle_result(result, epoch)


def settle_result(result: RunResult, epoch: int) -> Settle:
    """The same, of an attempt that gave a result."""
    failure = result.deciding.error
    if result.status == "finished":
        return partial(transitions.finish, epoch=epoch)
    if failure is not None:
        return settle_error(failure, epoch=epoch)
    if result.status in PUT_BACK:
        return partial(transitions.put_back, epoch=epoch, why=PUT_BACK[result.status])
    return partial(transitions.stop, epoch=epoch, why=f"its run was {result.status}")


def settle_error(failure: ShoalError, *, epoch: int) -> Settle:
    """Faults of the job, its data and its code come again with every attempt. Those of processes and disks may not."""
    why = f"{failure.code}: {failure.message}"
    passing = failure.code in ("SH503", "SH510") or (failure.code.startswith("SH6") and failure.code not in FINAL)
    return partial(transitions.die if passing else transitions.fail, epoch=epoch, why=why)


def waits_for_hosts(handle: RunHandle, lost: Sequence[str]) -> str:
    """Why an attempt ended, if the reason is a host of the cluster that cannot be reached: no fault of the job, and the
    next attempt does not wait for it. '' if it ended otherwise."""
    try:
        failure = handle.result().deciding.error
    except ShoalError as raised:
        failure = raised
    except (Exception, CancelledError):
        return ""
    unreachable = failure is not None and failure.code == UNREACHABLE
    return f"it waits for a host: {failure.message}" if failure and unreachable and lost else ""
