"""The setting of a measurement, as text for the command line of a side."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Setting:
    """Each worker pushes and pulls `floats`. `way`: tcp, as between hosts, or shm; for bare sockets also `both`. Sides
    without this option ignore it. With `mbit`, every process is on its own host behind a wire of that speed."""

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
        """Bytes per round, pushed and pulled by all workers."""
        return 2 * self.workers * self.size_bytes
