"""A trace: after every step, a short digest of each tensor of the state. Two traces show where two runs diverge."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

from shoal.checkpoint.state_tree import State, flatten
from shoal.checkpoint.tensor_bytes import bytes_of
from shoal.events import Event

DIGEST_BYTES = 8


class StateTrace:
    """A watcher that digests the state itself: one row per step, on the worker that saves. It writes no rows if
    `state()` is None, that is, if no single worker holds the whole state."""

    alone = True

    def __init__(self, append: Callable[[str], None], state: Callable[[], State | None]) -> None:
        """`append` gets each row."""
        self._append = append
        self._state = state

    def watch(self, event: Event) -> None:
        state = self._state() if event.kind == "step" else None
        if state is None:
            return
        tensors, _ = flatten(state)
        digests = {
            name.lstrip("/"): hashlib.blake2b(bytes_of(tensor), digest_size=DIGEST_BYTES).hexdigest()
            for name, tensor in tensors.items()
        }
        self._append(json.dumps({"step": event.step, "tensors": digests}) + "\n")
