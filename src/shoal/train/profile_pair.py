"""Runs two real workers on this host briefly: how much they slow each other down, and how long an exchange takes."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.collectives.group import ViewGroup
from shoal.collectives.outcome import Discarded
from shoal.collectives.transport.endpoint import Endpoint
from shoal.data.batch import Batch
from shoal.lanes.replica import Replica
from shoal.spec.view import Address, View
from shoal.strategies.ordered_sync import OrderedAllReduceSync

MIN_STEPS, MAX_STEPS = 5, 100
SLOW_S = 5.0
_WARM_UP_STEPS = 2


@dataclass(frozen=True)
class PairProfile:
    """A typical step of two workers with one lane each. `lane_cpu_s` is CPU time, which excludes time when other
    processes have the core: it shows how much slower the lane itself becomes."""

    lane_cpu_s: float
    exchange_s: float


def lower_quartile(seconds: Sequence[float]) -> float:
    """A robust minimum of several tries: other load on the machine only ever makes some of them longer."""
    return sorted(seconds)[len(seconds) // 4]


def profile_pair(replica: Replica, batch: Batch, *, budget_s: float) -> PairProfile | None:
    """Fork a second worker and take steps with it. It exits when the first is gone. None if they cannot connect."""
    token = secrets.token_hex(16)
    here, there = socket.socketpair()
    other = os.fork()
    if not other:
        try:
            here.close()
            _train(replica, batch, seat=1, token=token, other=there, budget_s=2 * budget_s + 10)
        finally:
            os._exit(0)
    there.close()
    try:
        with here:
            steps = _train(replica, batch, seat=0, token=token, other=here, budget_s=budget_s)[_WARM_UP_STEPS:]
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
    return PairProfile(*map(lower_quartile, zip(*steps, strict=True))) if steps else None


def _train(
    replica: Replica, batch: Batch, *, seat: int, token: str, other: socket.socket, budget_s: float
) -> list[tuple[float, float]]:
    """CPU seconds of the lane and seconds of the exchange, per step. Ends early if the other worker is gone."""
    endpoint = Endpoint(token)
    group = ViewGroup(endpoint, token)
    sync = OrderedAllReduceSync(2, group)
    found: list[tuple[float, float]] = []
    try:
        view = _view(endpoint.address, other, seat)
        threading.Thread(target=_abort_when_gone, args=(other, group), name="shoal-pair", daemon=True).start()
        if discarded := sync.reconfigure(view, seat):
            raise ConnectionError(discarded.why)
        began = time.perf_counter()
        while _needs_more_steps(len(found), time.perf_counter() - began, budget_s):
            start = time.thread_time()
            replica.begin_step()
            lane = replica.forward_backward(len(found), seat, batch, share=0.5)
            lane_cpu_s = time.thread_time() - start
            sums = sync.begin_step()
            sums.push_lane(seat, lane)
            done = sync.commit(replica, len(found), sums)
            if isinstance(done, Discarded):
                break
            found.append((lane_cpu_s, done.exchange_s + done.waited_s))
    except (OSError, ValueError):  # ValueError: the other worker died before it sent its address
        return []
    finally:
        sync.close()
        endpoint.close()
    return found


def _needs_more_steps(done: int, seconds: float, budget_s: float) -> bool:
    """Are more steps needed? At least a few are; of slow steps, hardly more than the warm-up."""
    return (
        done <= _WARM_UP_STEPS or (done < MIN_STEPS and seconds < SLOW_S) or (done < MAX_STEPS and seconds < budget_s)
    )


def _abort_when_gone(other: socket.socket, group: ViewGroup) -> None:
    """Abort the view when the other worker dies: the training thread must not wait for it forever."""
    with contextlib.suppress(OSError):
        other.recv(1)
    group.abort(1)


def _view(mine: Address, other: socket.socket, seat: int) -> View:
    """Exchange addresses with the other worker, and make the view of both."""
    other.sendall(mine.model_dump_json().encode() + b"\n")
    with other.makefile("rb") as said:
        theirs = Address.model_validate_json(said.readline())
    return View(number=1, carries={0: [0], 1: [1]}, addresses={seat: mine, 1 - seat: theirs})
