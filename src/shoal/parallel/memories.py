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

from shoal.checkpoint.live import receive_state, send_state
from shoal.codecs.memory import Memory
from shoal.wire.handshake import LinkError

Remembered = dict[int, dict[str, Any]]
"""By lane; an empty entry for a lane that has nothing to remember yet."""

SPARE_BYTES = 1 << 20
LOOK_UP_S = 0.1
PATIENCE_S = 10.0


class Memories:
    """Of the lanes that are carried here, and of those that were, until the next view has committed a step.

    Used by the training thread; `serve` by one thread per caller. `after` gives the step that follows one.
    """

    def __init__(self) -> None:
        self.after: Callable[[int], int] = lambda step: step + 1
        self._changed = threading.Condition()
        self._held: dict[int, Memory] = {}
        self._carried: set[int] = set()
        self._step = 0
        self._begun = False  # the next one
        self._encoded: set[int] = set()
        self._lost: set[int] = set()
        self._given: set[int] = set()
        self._serving = 0

    @property
    def step(self) -> int:
        """So many are settled."""
        return self._step

    # ---- a step ----

    def begin_step(self) -> None:
        self._begun = True

    def of(self, lane: int) -> Memory:
        """To encode the lane's part of the step."""
        self._encoded.add(lane)
        return self._held[lane]

    def branch(self) -> None:
        """The step changes what its lanes remember as it goes on."""
        for lane in self._carried:
            self._held[lane].branch()

    def part(self, start: int, stop: int) -> Part:
        return Part(self, start, stop)

    def settle(self) -> set[int]:
        """The step counts. Returns the lanes in it that began anew because what they remembered was lost."""
        with self._changed:
            return self._settle()

    def _settle(self) -> set[int]:
        for lane, memory in self._held.items():
            if lane in self._encoded:
                memory.settle()
            else:
                memory.stay()
        self._held = {lane: memory for lane, memory in self._held.items() if lane in self._carried}
        began = self._lost & self._encoded
        self._step, self._lost = self.after(self._step), self._lost - began
        self._begun, self._encoded, self._given = False, set(), set()
        return began

    def _known(self) -> dict[int, Memory]:
        """Without what was lost and has not begun again."""
        return {lane: memory for lane, memory in self._held.items() if lane not in self._lost}

    # ---- views ----

    def enter(self, step: int, lanes: Iterable[int]) -> set[int]:
        """These lanes are carried from this step on. Returns those of which nothing is known here."""
        with self._changed:
            if self._begun and step == self.after(self._step):  # it did not count here, but others had all they needed
                self._settle()
            elif step != self._step:
                self._held = {}
            self._held = self._known()  # somebody else may know what was given up for lost
            for memory in self._held.values():
                memory.back()
            self._step, self._carried = step, set(lanes)
            self._begun, self._encoded, self._lost, self._given = False, set(), set(), set()
            return self._carried - self._held.keys()

    def take(self, found: Mapping[int, Mapping[str, Any]], floats: int) -> None:
        """What others remembered at this step. ValueError if it is of another size."""
        for lane, state in found.items():
            memory = Memory(floats)
            memory.load_state(state)
            with self._changed:
                self._held[lane] = memory

    def begin(self, lanes: Iterable[int], floats: int, *, lost: bool) -> None:
        """These lanes remember nothing."""
        fresh = {lane: Memory(floats) for lane in lanes}
        with self._changed:
            self._held |= fresh
            self._lost |= fresh.keys() if lost else set()

    def load(self, step: int, found: Mapping[int, Mapping[str, Any]], floats: int) -> None:
        """From a checkpoint, all lanes; those who carry them will ask for them."""
        with self._changed:
            self._held, self._carried, self._lost, self._step = {}, set(), set(), step
            self._begun, self._encoded = False, set()
        self.take(found, floats)

    # ---- for others ----

    def at(self, step: int, lanes: Iterable[int] | None = None) -> Remembered:
        """What these lanes, or all, remember at a step, as far as it is known here: the tensors themselves."""
        with self._changed:
            ahead = step == self.after(self._step) and self._begun
            if step != self._step and not ahead:
                return {}
            chosen = self._known().keys() & (self._carried if ahead else self._held.keys())
            chosen &= chosen if lanes is None else set(lanes)
            later = self._encoded if ahead else set()
            return {lane: self._held[lane].state(settled=lane not in later) for lane in sorted(chosen)}

    def serve(self, sock: socket.socket, hello: Mapping[str, Any]) -> None:
        """Answer a caller that wants what some lanes remember at a step. LinkError if it says nothing of the kind."""
        step, lanes = hello.get("step"), hello.get("lanes")
        if type(step) is not int or not isinstance(lanes, list) or not all(type(lane) is int for lane in lanes):
            raise LinkError(f"a caller for lanes {lanes!r} at step {step!r}")
        found, given = self.at(step, lanes), set[int]()
        with self._changed:
            self._serving += 1
        try:
            with contextlib.suppress(LinkError):  # the caller is gone
                send_state(sock, found)
                if _unchanged(found, self.at(step, lanes)):
                    send_state(sock, {"step": step})
                    given = set(found)
        finally:
            with self._changed:
                self._serving -= 1
                self._given |= given
                self._changed.notify_all()

    def hand_over(self, given_up: Callable[[], bool]) -> None:
        """Before leaving while others go on: until they have everything that is held here, or nobody has come for it
        for a while."""
        waited_s = 0.0
        with self._changed:
            while not self._known().keys() <= self._given and waited_s < PATIENCE_S and not given_up():
                self._changed.wait(LOOK_UP_S)
                waited_s = 0.0 if self._serving else waited_s + LOOK_UP_S


class Part:
    """Of what lanes remember, what belongs to one fragment. It leaves more than once in a step."""

    def __init__(self, memories: Memories, start: int, stop: int) -> None:
        self._memories = memories
        self._start, self._stop = start, stop
        self._encoded: set[int] = set()

    def begin_step(self) -> None:
        self._memories.branch()
        self._encoded = set()

    def of(self, lane: int) -> PartMemory:
        self._encoded.add(lane)
        return PartMemory(self._memories._held[lane], self._start)

    def turn(self) -> None:
        """All lanes have left that have anything to send."""
        for lane in self._encoded:
            self._memories._held[lane].turn(self._start, self._stop)


@dataclass(frozen=True)
class PartMemory:
    whole: Memory
    start: int

    def part(self, start: int, stop: int) -> tuple[Tensor | None, Tensor]:
        return self.whole.part(self.start + start, self.start + stop)


def receive(sock: socket.socket, *, step: int, lanes: Iterable[int], floats: int) -> Remembered:
    """What `serve` answers. LinkError for anything else."""
    wanted = set(lanes)
    most_bytes = len(wanted) * 4 * floats + SPARE_BYTES
    found = receive_state(sock, most_bytes=most_bytes)
    if not isinstance(found, dict) or not found.keys() <= wanted:
        raise LinkError("answers what it was not asked")
    if receive_state(sock, most_bytes=SPARE_BYTES) != {"step": step}:
        raise LinkError("went on meanwhile")
    for state in found.values():
        _check(state, floats)
    return found


def _check(state: Any, floats: int) -> None:
    if state == {}:
        return
    memory = state.get("memory") if isinstance(state, dict) else None
    if not isinstance(memory, Tensor) or (memory.dtype, tuple(memory.shape)) != (torch.float32, (floats,)):
        raise LinkError("remembers something of another kind")


def _unchanged(found: Remembered, now: Remembered) -> bool:
    """Is it the very same memory?"""
    return found.keys() == now.keys() and all(now[lane].get("memory") is found[lane].get("memory") for lane in found)
