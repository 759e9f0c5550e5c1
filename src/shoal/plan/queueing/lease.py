"""Which daemon serves a queue. A lease is a counter, which observers watch with their own clocks, not the wall clock.

A daemon counts up while it lives. An observer that has not seen the counter change for LEASE_S of its own monotonic
clock takes the lease with the next epoch. A clock that is set back or forward changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import NonNegativeInt

from shoal.spec.base import Spec

LEASE_S = 30.0
"""Seconds without a beat after which a daemon counts as dead, if nothing else tells."""
BEAT_S = 3.0


class Lease(Spec):
    """`holder` names the process and the boot of its machine; '' if the last daemon ended in good order."""

    epoch: NonNegativeInt = 0
    holder: str = ""
    pid: NonNegativeInt = 0
    beats: NonNegativeInt = 0
    stop_requested: bool = False

    def taken(self, *, holder: str, pid: int) -> Lease:
        return Lease(epoch=self.epoch + 1, holder=holder, pid=pid)

    def renewed(self) -> Lease:
        return self.model_copy(update={"beats": self.beats + 1})

    def released(self) -> Lease:
        return self.model_copy(update={"holder": "", "pid": 0, "stop_requested": False})


@dataclass
class LeaseWatch:
    """One observer of a lease. `now_s` is its monotonic clock."""

    _seen: tuple[int, int] = (-1, -1)
    _since_s: float = 0.0

    def is_free(self, lease: Lease, now_s: float, *, holder_is_dead: bool = False) -> bool:
        """Whether the lease may be taken: it was given back, its holder is known to be dead, or it stands still."""
        if not lease.holder or holder_is_dead:
            return True
        if self._seen != (lease.epoch, lease.beats):
            self._seen, self._since_s = (lease.epoch, lease.beats), now_s
        return now_s - self._since_s >= LEASE_S
