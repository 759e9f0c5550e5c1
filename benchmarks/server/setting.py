"""What a side is asked to do, as text for its command line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Setting:
    """`floats` are pushed by each worker, and come back to it. `way`: tcp, as between hosts, or shm; for bare sockets
    also `both`. A transport that knows none takes what it finds. With `mbit`, every process is on a host of its own,
    with a wire of that speed."""

    workers: int = 1
    servers: int = 1
    backups: int = 0
    way: str = "tcp"
    optimizer: str = "SGD"
    floats: int = 10_000_000
    mbit: float = 0.0

    def as_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Setting:
        return cls(**json.loads(text))

    @property
    def size_bytes(self) -> int:
        return 4 * self.floats

    @property
    def round_bytes(self) -> int:
        """There and back, all workers."""
        return 2 * self.workers * self.size_bytes
