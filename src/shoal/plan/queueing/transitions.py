"""What becomes of an entry: every change of its state is one of these functions.

Only the daemon whose epoch stands in the entry may report on it. A daemon that was replaced, and does not know it yet,
gets StaleEpochError and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.plan.queueing.entry import QueueEntry

MAX_EARLY_DEATHS = 3
"""Attempts in a row that may end early before the entry is held: in their first seconds, and without a new step."""
PROVEN_S = 10.0
"""Seconds after which an attempt no longer counts as one that ended early."""
MAX_FRUITLESS = 10
"""Attempts in a row that may end without a new step, however long they took, before the entry is held."""
AT_ONCE = 2
"""After so many of them the next begins at once; later ones wait ever longer."""
FIRST_PAUSE_S, MAX_PAUSE_S = 5.0, 300.0


class StaleEpochError(Exception):
    """Another daemon has the entry, or the queue, since then."""


class WrongStateError(Exception):
    """The change is not possible in the entry's present state."""


def claim(entry: QueueEntry, *, epoch: int, run: str) -> QueueEntry:
    """A daemon starts the job, or resumes its run: an entry keeps the run that it was given first."""
    if entry.state != "waiting" or entry.cancel_requested:
        raise WrongStateError(f"job {entry.id} is {entry.state}")
    return _change(
        entry,
        state="running",
        epoch=epoch,
        run=entry.run or run,
        attempts=entry.attempts + 1,
        fruitless=entry.fruitless + 1,
        proven=False,
        reason="",
    )


def prove(entry: QueueEntry, *, epoch: int) -> QueueEntry:
    """The present attempt has outlived its first seconds."""
    _require(entry, epoch)
    return _change(entry, proven=True, early_deaths=0)


def progress(entry: QueueEntry, *, epoch: int) -> QueueEntry:
    """The present attempt has made a new step."""
    return _change(prove(entry, epoch=epoch), fruitless=0)


def resize(entry: QueueEntry, *, epoch: int, workers: int, why: str = "") -> QueueEntry:
    _require(entry, epoch)
    return _change(entry, workers=workers, reason=why)


def say(entry: QueueEntry, *, why: str) -> QueueEntry:
    """Why a job waits, or has as many workers as it has."""
    return _change(entry, reason=why) if entry.state in ("waiting", "running") else entry


def overtake(entry: QueueEntry, *, times: int) -> QueueEntry:
    """So many others have started before the job, which stood before them."""
    return _change(entry, overtaken=entry.overtaken + times)


def finish(entry: QueueEntry, *, epoch: int) -> QueueEntry:
    _require(entry, epoch)
    return _end(entry, "finished", "")


def fail(entry: QueueEntry, *, epoch: int, why: str) -> QueueEntry:
    """The run failed by a fault of the job: another attempt would fail too."""
    _require(entry, epoch)
    return _end(entry, "failed", why)


def stop(entry: QueueEntry, *, epoch: int, why: str) -> QueueEntry:
    """Somebody stopped the run by hand. It waits for a release."""
    _require(entry, epoch)
    return _end(entry, "cancelled", "it was cancelled") if entry.cancel_requested else _idle(entry, "held", why)


def put_back(entry: QueueEntry, *, epoch: int, why: str) -> QueueEntry:
    """The daemon ends in good order. The run is saved, and the next daemon resumes it."""
    _require(entry, epoch)
    entry = _change(entry, fruitless=max(entry.fruitless - 1, 0))  # it did not end by itself
    return _end(entry, "cancelled", "it was cancelled") if entry.cancel_requested else _idle(entry, "waiting", why)


def die(entry: QueueEntry, *, epoch: int, why: str) -> QueueEntry:
    """The attempt ended by a fault that may be the machine's: it is resumed, unless it ends early again and again."""
    _require(entry, epoch)
    return _after_death(entry, why)


def lose_driver(entry: QueueEntry, *, new_epoch: int) -> QueueEntry:
    """The daemon that ran the job is dead. A new daemon with this epoch takes stock."""
    if entry.state != "running" or entry.epoch >= new_epoch:
        raise WrongStateError(f"job {entry.id} has lost no driver")
    return _after_death(entry, "the daemon that ran it died")


def request_cancel(entry: QueueEntry) -> QueueEntry:
    """A running job is saved and stopped by its daemon; any other is cancelled at once."""
    if entry.has_ended:
        raise WrongStateError(f"job {entry.id} is {entry.state} already")
    if entry.state == "running":
        return _change(entry, cancel_requested=True)
    return _end(entry, "cancelled", "it was cancelled")


def change_priority(entry: QueueEntry, *, priority: int) -> QueueEntry:
    if entry.has_ended:
        raise WrongStateError(f"job {entry.id} is {entry.state} already")
    return _change(entry, priority=priority)


def release(entry: QueueEntry) -> QueueEntry:
    """Let a held or failed job go on; its run is resumed."""
    if entry.state not in ("held", "failed"):
        raise WrongStateError(f"job {entry.id} is {entry.state}")
    if entry.blocked_by:
        raise WrongStateError(f"job {entry.id} comes after job {entry.blocked_by}: release that one")
    return _change(entry, state="waiting", reason="", early_deaths=0, fruitless=0, ended_t=0.0)


def follow_predecessors(entry: QueueEntry, predecessors: Sequence[QueueEntry]) -> QueueEntry:
    """What the states of all jobs that it comes after mean for a job. Returns the same entry if nothing changes."""
    by_state = {one.state: one for one in predecessors}
    if entry.state not in ("waiting", "held"):
        return entry
    if gone := by_state.get("cancelled"):
        return _end(entry, "cancelled", f"job {gone.id}, which it comes after, was cancelled")
    if entry.state == "held" and not entry.blocked_by:
        return entry
    if stuck := by_state.get("failed") or by_state.get("held"):
        said = "failed" if stuck.state == "failed" else "is held"
        reason = f"job {stuck.id}, which it comes after, {said}"
        return _change(entry, state="held", reason=reason, blocked_by=stuck.id)
    return release(_change(entry, blocked_by=0)) if entry.blocked_by else entry


def _after_death(entry: QueueEntry, why: str) -> QueueEntry:
    if entry.cancel_requested:
        return _end(entry, "cancelled", "it was cancelled")
    deaths = 0 if entry.proven else entry.early_deaths + 1
    entry = _change(entry, early_deaths=deaths)
    if deaths >= MAX_EARLY_DEATHS:
        return _idle(entry, "held", f"{deaths} attempts in a row ended early, without a new step; the last: {why}")
    if entry.fruitless >= MAX_FRUITLESS:
        return _idle(entry, "held", f"{entry.fruitless} attempts in a row made no new step; the last: {why}")
    if pause := pause_s(entry):
        after = f"{entry.fruitless} attempts in a row made no new step, so it will be resumed after {pause:g} s"
        return _idle(entry, "waiting", f"{after}: {why}")
    return _idle(entry, "waiting", f"it will be resumed: {why}")


def pause_s(entry: QueueEntry) -> float:
    """Seconds to wait before the next attempt."""
    later = entry.fruitless - AT_ONCE
    return min(FIRST_PAUSE_S * 2.0 ** (later - 1), MAX_PAUSE_S) if later > 0 else 0.0


def _require(entry: QueueEntry, epoch: int) -> None:
    if entry.state != "running" or entry.epoch != epoch:
        raise StaleEpochError(f"job {entry.id} is {entry.state} in epoch {entry.epoch}, not {epoch}")


def _idle(entry: QueueEntry, state: str, why: str) -> QueueEntry:
    return _change(entry, state=state, reason=why, epoch=0, workers=0, proven=False)


def _end(entry: QueueEntry, state: str, why: str) -> QueueEntry:
    return _change(_idle(entry, state, why), cancel_requested=False)


def _change(entry: QueueEntry, **fields: Any) -> QueueEntry:
    return entry.model_copy(update=fields)
