"""Error feedback residuals of lanes: each lives on the worker that runs the lane, and moves with the lane.

Encoding step n writes the residual of step n + 1 into a second bank, and committing the step swaps the banks. Peers may
ask for the residual of the last committed step, or of the next one if some worker has already committed it (that is
only possible if this worker's encoding was complete). Neither value changes until the asking worker joins another step,
so reads need no coordination.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.checkpoint.state_format import receive_state, send_state
from shoal.codecs.residual import Residual
from shoal.collectives.outcome import Discarded
from shoal.collectives.transport.greeting import Greeting
from shoal.net.errors import LinkError
from shoal.spec.view import View, step_of

ResidualStates = dict[int, dict[str, Any]]
"""By lane; an empty entry for a lane that has no residual yet."""
Report = Callable[..., object]

OVERHEAD_BYTES = 1 << 20
POLL_S = 0.1
HAND_OVER_TIMEOUT_S = 10.0
"""Seconds without a reader after which a leaving worker stops waiting for its residuals to be fetched."""


class LaneResiduals:
    """The residuals of this worker's lanes, and of its former lanes until the next view has committed a step.

    Used by the training thread; `serve` runs in one thread per caller. `step_after` gives the step that follows a step.
    """

    def __init__(self) -> None:
        self.step_after: Callable[[int], int] = lambda step: step + 1
        self._changed = threading.Condition()
        self._residuals: dict[int, Residual] = {}
        self._carried: set[int] = set()
        self._step = 0
        self._step_begun = False  # of the step after `_step`
        self._encoded: set[int] = set()
        self._lost: set[int] = set()
        self._fetched: set[int] = set()
        self._active_readers = 0

    @property
    def step(self) -> int:
        """The last committed step."""
        return self._step

    # ---- steps ----

    def begin_step(self) -> None:
        self._step_begun = True

    def for_lane(self, lane: int) -> Residual:
        """The residual with which the lane's part of the step is encoded."""
        self._encoded.add(lane)
        return self._residuals[lane]

    def branch(self) -> None:
        """Prepare for a step that changes its lanes' residuals more than once."""
        for lane in self._carried:
            self._residuals[lane].branch()

    def fragment(self, start: int, stop: int) -> FragmentResiduals:
        return FragmentResiduals(self, start, stop)

    def commit(self) -> set[int]:
        """Commit the step. Returns its lanes that started without a residual because theirs was lost."""
        with self._changed:
            return self._commit()

    def _commit(self) -> set[int]:
        for lane, residual in self._residuals.items():
            if lane in self._encoded:
                residual.commit()
            else:
                residual.commit_unchanged()
        self._residuals = {lane: residual for lane, residual in self._residuals.items() if lane in self._carried}
        restarted = self._lost & self._encoded
        self._step, self._lost = self.step_after(self._step), self._lost - restarted
        self._step_begun, self._encoded, self._fetched = False, set(), set()
        return restarted

    def _valid(self) -> dict[int, Residual]:
        """Without the lanes whose residual was lost and that have committed no step since."""
        return {lane: residual for lane, residual in self._residuals.items() if lane not in self._lost}

    # ---- views ----

    def enter(self, step: int, lanes: Iterable[int]) -> set[int]:
        """This worker runs these lanes from this step on. Returns the lanes whose residual is not here."""
        with self._changed:
            if self._step_begun and step == self.step_after(self._step):  # discarded here, but committed by a peer
                self._commit()
            elif step != self._step:
                self._residuals = {}
            self._residuals = self._valid()  # a peer may have a residual that this worker counted as lost
            for residual in self._residuals.values():
                residual.rollback()
            self._step, self._carried = step, set(lanes)
            self._step_begun, self._encoded, self._lost, self._fetched = False, set(), set(), set()
            return self._carried - self._residuals.keys()

    def adopt(self, found: Mapping[int, Mapping[str, Any]], floats: int) -> None:
        """Take the residuals that peers had at this step. ValueError if one has another size."""
        for lane, state in found.items():
            residual = Residual(floats)
            residual.load_state(state)
            with self._changed:
                self._residuals[lane] = residual

    def start_empty(self, lanes: Iterable[int], floats: int, *, lost: bool) -> None:
        """Start these lanes without a residual."""
        fresh = {lane: Residual(floats) for lane in lanes}
        with self._changed:
            self._residuals |= fresh
            self._lost |= fresh.keys() if lost else set()

    def load(self, step: int, found: Mapping[int, Mapping[str, Any]], floats: int) -> None:
        """Load the residuals of all lanes from a checkpoint; the workers that run the lanes fetch them."""
        with self._changed:
            self._residuals, self._carried, self._lost, self._step = {}, set(), set(), step
            self._step_begun, self._encoded = False, set()
        self.adopt(found, floats)

    # ---- reads by peers ----

    def at_step(self, step: int, lanes: Iterable[int] | None = None) -> ResidualStates:
        """The residuals of these lanes, or of all, at a step, as far as they are here: not copies."""
        with self._changed:
            ahead = step == self.step_after(self._step) and self._step_begun
            if step != self._step and not ahead:
                return {}
            chosen = self._valid().keys() & (self._carried if ahead else self._residuals.keys())
            chosen &= chosen if lanes is None else set(lanes)
            later = self._encoded if ahead else set()
            return {lane: self._residuals[lane].state(committed=lane not in later) for lane in sorted(chosen)}

    def serve(self, sock: socket.socket, greeting: Greeting) -> None:
        """Answer a peer that asks for the residuals of some lanes at a step."""
        step, lanes = greeting.step, greeting.lanes
        if step is None:
            raise LinkError("asks for residuals of no step")
        found, sent = self.at_step(step, lanes), set[int]()
        with self._changed:
            self._active_readers += 1
        try:
            with contextlib.suppress(LinkError):  # the peer is gone
                send_state(sock, found)
                if _unchanged(found, self.at_step(step, lanes)):
                    send_state(sock, {"step": step})
                    sent = set(found)
        finally:
            with self._changed:
                self._active_readers -= 1
                self._fetched |= sent
                self._changed.notify_all()

    def hand_over(self, given_up: Callable[[], bool]) -> None:
        """Before this worker leaves a running job: wait until peers have fetched all residuals, or none has asked for
        a while."""
        waited_s = 0.0
        with self._changed:
            while not self._valid().keys() <= self._fetched and waited_s < HAND_OVER_TIMEOUT_S and not given_up():
                self._changed.wait(POLL_S)
                waited_s = 0.0 if self._active_readers else waited_s + POLL_S


class FragmentResiduals:
    """The part of the lanes' residuals that belongs to one fragment, which is sent more than once in a step."""

    def __init__(self, residuals: LaneResiduals, start: int, stop: int) -> None:
        self._residuals = residuals
        self._start, self._stop = start, stop
        self._encoded: set[int] = set()

    def begin_step(self) -> None:
        self._residuals.branch()
        self._encoded = set()

    def for_lane(self, lane: int) -> ResidualSlice:
        self._encoded.add(lane)
        return ResidualSlice(self._residuals._residuals[lane], self._start)

    def carry_forward(self) -> None:
        """Called when all lanes with samples have sent the fragment."""
        for lane in self._encoded:
            self._residuals._residuals[lane].carry_forward(self._start, self._stop)


@dataclass(frozen=True)
class ResidualSlice:
    residual: Residual
    start: int

    def before_and_after(self, start: int, stop: int) -> tuple[Tensor | None, Tensor]:
        return self.residual.before_and_after(self.start + start, self.start + stop)


class ResidualPeers(Protocol):
    """This worker's residuals, and requests for those of its peers."""

    residuals: LaneResiduals

    def fetch_residuals(
        self, view: View, seat: int, *, source: int, step: int, lanes: Iterable[int], floats: int
    ) -> ResidualStates | Discarded: ...


class ResidualTransfer:
    """Moves residuals with their lanes from view to view. A lane whose residual no worker has starts without one.

    Used by the loop's thread. A residual has `floats` values. Reports `residual_lost` if a lane starts without one.
    """

    def __init__(self, peers: ResidualPeers, floats: int, report: Report | None = None) -> None:
        self._peers = peers
        self._floats = floats
        self._report = report or (lambda kind, **fields: None)
        self._view: View | None = None
        self._seat = 0
        self._carried: Mapping[int, list[int]] = {}
        """Which worker ran which lanes at the last step that this worker committed."""
        self._lost_worker: dict[int, str] = {}

    def enter(self, view: View, seat: int) -> Discarded | None:
        """Fetch the residuals of this worker's lanes from its peers. Discarded if the view cannot begin."""
        self._view, self._seat = view, seat
        residuals, step = self._peers.residuals, step_of(view.position)
        missing = residuals.enter(step, view.carries[seat])
        if step:
            found, failures = self._fetch_from_peers(view, step, missing)
            if why := next((why for source, why in failures.items() if source in view.carries), ""):
                return Discarded(why)
            residuals.adopt(found, self._floats)
            missing -= found.keys()
        residuals.start_empty(missing, self._floats, lost=step > 0)
        self._lost_worker |= {
            lane: f"worker-{worker}" for worker, lanes in self._carried.items() for lane in missing & {*lanes}
        }
        return None

    def _fetch_from_peers(self, view: View, step: int, lanes: Iterable[int]) -> tuple[ResidualStates, dict[int, str]]:
        """Ask members and former members, first those that ran the lanes before. Also returns the failures by peer."""
        wanted, found, failures = set(lanes), ResidualStates(), dict[int, str]()
        likely = {source for source, lanes in self._carried.items() if wanted & set(lanes)}
        for source in sorted(view.addresses.keys() - {self._seat}, key=lambda s: (s not in likely, s)):
            if not wanted:
                break
            answer = self._peers.fetch_residuals(
                view, self._seat, source=source, step=step, lanes=wanted, floats=self._floats
            )
            if isinstance(answer, Discarded):
                failures[source] = answer.why
            else:
                found |= answer
                wanted -= answer.keys()
        return found, failures

    def commit(self, step: int) -> None:
        for lane in sorted(self._peers.residuals.commit()):
            self._report("residual_lost", step=step, lane=lane, worker=self._lost_worker.get(lane, ""))
        assert self._view is not None
        self._carried = self._view.carries

    def state(self) -> dict[str, Any]:
        """The residuals of all lanes, without those of workers that cannot be reached."""
        if self._view is None:
            return {}
        residuals = self._peers.residuals
        found = residuals.at_step(residuals.step)
        missing = {lane for lanes in self._view.carries.values() for lane in lanes} - found.keys()
        others, _ = self._fetch_from_peers(self._view, residuals.step, missing)
        return {"remembered": found | others}

    def load_state(self, step: int, state: Mapping[str, Any]) -> None:
        self._peers.residuals.load(step, state.get("remembered", {}), self._floats)


def receive_residuals(sock: socket.socket, *, step: int, lanes: Iterable[int], floats: int) -> ResidualStates:
    """Receive the answer of `LaneResiduals.serve`. LinkError for anything else."""
    wanted = set(lanes)
    found = receive_state(sock, max_bytes=len(wanted) * 4 * floats + OVERHEAD_BYTES)
    if not isinstance(found, dict) or not found.keys() <= wanted:
        raise LinkError("sent residuals that were not asked for")
    if receive_state(sock, max_bytes=OVERHEAD_BYTES) != {"step": step}:
        raise LinkError("changed its residuals while sending them")
    for state in found.values():
        _check_residual(state, floats)
    return found


def _check_residual(state: Any, floats: int) -> None:
    if state == {}:
        return
    residual = state.get("memory") if isinstance(state, dict) else None
    if not isinstance(residual, Tensor) or (residual.dtype, tuple(residual.shape)) != (torch.float32, (floats,)):
        raise LinkError("sent a residual of another size or dtype")


def _unchanged(found: ResidualStates, now: ResidualStates) -> bool:
    """Whether both hold the same tensor objects."""
    return found.keys() == now.keys() and all(now[lane].get("memory") is found[lane].get("memory") for lane in found)
