"""What codecs remember belongs to lanes: it goes where its lane goes, and nobody else has it.

Encoding step n leaves what the lane remembers at n + 1 in a second bank, and committing the step settles it. So two
steps can be asked for: the settled one, and the next one if somebody committed it already, for that needed all that was
encoded here. Neither changes before whoever asks takes part in another step, so asking needs no agreement.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.state_format import receive_state, send_state
from shoal.codecs.residual import Residual
from shoal.net.errors import LinkError

ResidualStates = dict[int, dict[str, Any]]
"""By lane; an empty entry for a lane that has nothing to remember yet."""

OVERHEAD_BYTES = 1 << 20
POLL_S = 0.1
HAND_OVER_TIMEOUT_S = 10.0


class LaneResiduals:
    """Of the lanes that are carried here, and of those that were, until the next view has committed a step.

    Used by the training thread; `serve` by one thread per caller. `after` gives the step that follows one.
    """

    def __init__(self) -> None:
        self.step_after: Callable[[int], int] = lambda step: step + 1
        self._changed = threading.Condition()
        self._residuals: dict[int, Residual] = {}
        self._carried: set[int] = set()
        self._step = 0
        self._step_begun = False  # the next one
        self._encoded: set[int] = set()
        self._lost: set[int] = set()
        self._fetched: set[int] = set()
        self._active_readers = 0

    @property
    def step(self) -> int:
        """So many are settled."""
        return self._step

    # ---- a step ----

    def begin_step(self) -> None:
        self._step_begun = True

    def for_lane(self, lane: int) -> Residual:
        """To encode the lane's part of the step."""
        self._encoded.add(lane)
        return self._residuals[lane]

    def branch(self) -> None:
        """The step changes what its lanes remember as it goes on."""
        for lane in self._carried:
            self._residuals[lane].branch()

    def fragment(self, start: int, stop: int) -> FragmentResiduals:
        return FragmentResiduals(self, start, stop)

    def commit(self) -> set[int]:
        """The step counts. Returns the lanes in it that began anew because what they remembered was lost."""
        with self._changed:
            return self._commit()

    def _commit(self) -> set[int]:
        for lane, memory in self._residuals.items():
            if lane in self._encoded:
                memory.commit()
            else:
                memory.commit_unchanged()
        self._residuals = {lane: memory for lane, memory in self._residuals.items() if lane in self._carried}
        began = self._lost & self._encoded
        self._step, self._lost = self.step_after(self._step), self._lost - began
        self._step_begun, self._encoded, self._fetched = False, set(), set()
        return began

    def _valid(self) -> dict[int, Residual]:
        """Without what was lost and has not begun again."""
        return {lane: memory for lane, memory in self._residuals.items() if lane not in self._lost}

    # ---- views ----

    def enter(self, step: int, lanes: Iterable[int]) -> set[int]:
        """These lanes are carried from this step on. Returns those of which nothing is known here."""
        with self._changed:
            if self._step_begun and step == self.step_after(
                self._step
            ):  # it did not count here, but others had all they needed
                self._commit()
            elif step != self._step:
                self._residuals = {}
            self._residuals = self._valid()  # somebody else may know what was given up for lost
            for memory in self._residuals.values():
                memory.rollback()
            self._step, self._carried = step, set(lanes)
            self._step_begun, self._encoded, self._lost, self._fetched = False, set(), set(), set()
            return self._carried - self._residuals.keys()

    def adopt(self, found: Mapping[int, Mapping[str, Any]], floats: int) -> None:
        """What others remembered at this step. ValueError if it is of another size."""
        for lane, state in found.items():
            memory = Residual(floats)
            memory.load_state(state)
            with self._changed:
                self._residuals[lane] = memory

    def start_empty(self, lanes: Iterable[int], floats: int, *, lost: bool) -> None:
        """These lanes remember nothing."""
        fresh = {lane: Residual(floats) for lane in lanes}
        with self._changed:
            self._residuals |= fresh
            self._lost |= fresh.keys() if lost else set()

    def load(self, step: int, found: Mapping[int, Mapping[str, Any]], floats: int) -> None:
        """From a checkpoint, all lanes; those who carry them will ask for them."""
        with self._changed:
            self._residuals, self._carried, self._lost, self._step = {}, set(), set(), step
            self._step_begun, self._encoded = False, set()
        self.adopt(found, floats)

    # ---- for others ----

    def at_step(self, step: int, lanes: Iterable[int] | None = None) -> ResidualStates:
        """What these lanes, or all, remember at a step, as far as it is known here: the tensors themselves."""
        with self._changed:
            ahead = step == self.step_after(self._step) and self._step_begun
            if step != self._step and not ahead:
                return {}
            chosen = self._valid().keys() & (self._carried if ahead else self._residuals.keys())
            chosen &= chosen if lanes is None else set(lanes)
            later = self._encoded if ahead else set()
            return {lane: self._residuals[lane].state(committed=lane not in later) for lane in sorted(chosen)}

    def serve(self, sock: socket.socket, hello: Mapping[str, Any]) -> None:
        """Answer a caller that wants what some lanes remember at a step. LinkError if it says nothing of the kind."""
        step, lanes = hello.get("step"), hello.get("lanes")
        if type(step) is not int or not isinstance(lanes, list) or not all(type(lane) is int for lane in lanes):
            raise LinkError(f"a caller for lanes {lanes!r} at step {step!r}")
        found, given = self.at_step(step, lanes), set[int]()
        with self._changed:
            self._active_readers += 1
        try:
            with contextlib.suppress(LinkError):  # the caller is gone
                send_state(sock, found)
                if _unchanged(found, self.at_step(step, lanes)):
                    send_state(sock, {"step": step})
                    given = set(found)
        finally:
            with self._changed:
                self._active_readers -= 1
                self._fetched |= given
                self._changed.notify_all()

    def hand_over(self, given_up: Callable[[], bool]) -> None:
        """Before leaving while others go on: until they have everything that is held here, or nobody has come for it
        for a while."""
        waited_s = 0.0
        with self._changed:
            while not self._valid().keys() <= self._fetched and waited_s < HAND_OVER_TIMEOUT_S and not given_up():
                self._changed.wait(POLL_S)
                waited_s = 0.0 if self._active_readers else waited_s + POLL_S


class FragmentResiduals:
    """Of what lanes remember, what belongs to one fragment. It leaves more than once in a step."""

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
        """All lanes have left that have anything to send."""
        for lane in self._encoded:
            self._residuals._residuals[lane].carry_forward(self._start, self._stop)


@dataclass(frozen=True)
class ResidualSlice:
    residual: Residual
    start: int

    def before_and_after(self, start: int, stop: int) -> tuple[Tensor | None, Tensor]:
        return self.residual.before_and_after(self.start + start, self.start + stop)


def receive_residuals(sock: socket.socket, *, step: int, lanes: Iterable[int], floats: int) -> ResidualStates:
    """What `serve` answers. LinkError for anything else."""
    wanted = set(lanes)
    most_bytes = len(wanted) * 4 * floats + OVERHEAD_BYTES
    found = receive_state(sock, max_bytes=most_bytes)
    if not isinstance(found, dict) or not found.keys() <= wanted:
        raise LinkError("answers what it was not asked")
    if receive_state(sock, max_bytes=OVERHEAD_BYTES) != {"step": step}:
        raise LinkError("went on meanwhile")
    for state in found.values():
        _check_residual(state, floats)
    return found


def _check_residual(state: Any, floats: int) -> None:
    if state == {}:
        return
    memory = state.get("memory") if isinstance(state, dict) else None
    if not isinstance(memory, Tensor) or (memory.dtype, tuple(memory.shape)) != (torch.float32, (floats,)):
        raise LinkError("remembers something of another kind")


def _unchanged(found: ResidualStates, now: ResidualStates) -> bool:
    """Is it the very same memory?"""
    return found.keys() == now.keys() and all(now[lane].get("memory") is found[lane].get("memory") for lane in found)
