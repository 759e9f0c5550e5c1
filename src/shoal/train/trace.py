"""A trace: after every step, a short digest of each tensor of the state. Two of them tell where runs part."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from shoal.checkpoint.state_tree import flatten
from shoal.checkpoint.tensor_bytes import bytes_of
from shoal.events import Event
from shoal.lanes.replica import Replica

DIGEST_BYTES = 8


class StateTrace:
    """A watcher that looks at the weights themselves: one row per step, by the worker that saves."""

    alone = True

    def __init__(self, path: Path, replica: Replica) -> None:
        self._path = path
        self._replica = replica

    def watch(self, event: Event) -> None:
        if event.kind != "step":
            return
        tensors, _ = flatten(self._replica.state())
        digests = {
            name.lstrip("/"): hashlib.blake2b(bytes_of(tensor), digest_size=DIGEST_BYTES).hexdigest()
            for name, tensor in tensors.items()
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": event.step, "tensors": digests}) + "\n")
