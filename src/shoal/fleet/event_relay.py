"""Events of a worker that cannot reach the run's directory: what the driver writes to the run's stream for it.

A worker that joined never saves, so it reports its own work and nothing about the result. Rows of other kinds, and
numbers that its work cannot have, are refused. A worker that the run's engine started is believed as if it had written
the row itself. Nobody's clock is used: each event gets the driver's time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from shoal.events import Event
from shoal.events.stream import parse_event
from shoal.fleet.messages import printable
from shoal.fleet.rate_limit import RateLimit
from shoal.net.errors import ProtocolError

RESERVED_KINDS = frozenset({
    "run_started", "run_ended", "plan", "replan", "view", "refused", "evicted", "worker_died", "verified",
    "resumed", "layout", "evaluated", "best", "saved", "finished",
    "servers_wanted", "server_started", "chunk_table", "server_stats", "server_died", "server_left", "servers_lost",
})  # fmt: skip
"""What only the driver, or the worker that saves, can know. A worker that joined and reports it is refused."""
DRIVER_KINDS = RESERVED_KINDS - {"resumed", "layout", "evaluated", "best", "saved", "finished"} | {"seats_given"}
"""What no worker reports."""
RELAYED_KINDS = frozenset({
    "worker_started", "caught_up", "link_measured", "joined", "stopped", "step", "note", "left", "failed",
    "residual_lost", "loader_restarted", "weights_loaded",
})  # fmt: skip
"""Other kinds are ignored, such as `built`: a worker with the run's directory reports the same, and is believed."""
ROW_BYTES_S, ROW_BURST_BYTES = 1 << 20, 16 << 20
"""What a worker may add to the stream in the long run and at once."""
MAX_TEXT_CHARACTERS = 2000
MAX_LIST_LENGTH = 1000
MAX_ROW_SECONDS = 1e6


@dataclass
class EventRelay:
    """Checks the events of one worker, in order. `batch_size` and `lanes` are the job's. `managed`: the run's engine
    started it."""

    name: str
    lanes: int
    batch_size: int
    managed: bool = False
    _limit: RateLimit = field(default_factory=lambda: RateLimit(ROW_BYTES_S, ROW_BURST_BYTES))
    _step: int = 0

    def relay(self, row: str, *, host: str, last_step: int | None) -> Event | None:
        """The event to write, or None for a row that is ignored. ProtocolError if the worker may not report this.
        `last_step` is the job's, once it is known. The failure of a worker that joined does not fail the run."""
        if not self._limit.allows(len(row), time.monotonic()):
            raise ProtocolError("it sends too many events")
        if self.managed:
            return self._relay_own(row)
        event = parse_event(row.encode("utf-8", "replace"))
        if event is None:
            raise ProtocolError("it sends an event that breaks the schema")
        if event.who != self.name:  # it had another seat when it wrote the row
            return None
        if event.kind in RESERVED_KINDS:
            raise ProtocolError(f"it may not report '{event.kind}'")
        if event.kind not in RELAYED_KINDS:
            return None
        if last_step is not None and (event.step or 0) > last_step:
            raise ProtocolError(f"it reports step {event.step}, beyond the end of the job")
        fields = {name: _bounded(name, value) for name, value in event.fields.items()}
        if event.kind == "failed":
            message = printable(f"{self.name} ({host}) failed: {fields['message']}", limit=MAX_TEXT_CHARACTERS)
            return Event("note", time.time(), self.name, event.step, {"message": message})
        if event.kind == "joined":
            self._check_joined(event)
        elif event.kind == "step" and not self._advance(event, last_step):
            return None
        return Event(event.kind, time.time(), self.name, event.step, fields)

    def _relay_own(self, row: str) -> Event:
        event = parse_event(row.encode("utf-8", "replace"))
        if event is None or event.who != self.name or event.kind in DRIVER_KINDS:
            raise ProtocolError("it sends an event that is not its own, or breaks the schema")
        return Event(event.kind, time.time(), self.name, event.step, event.fields)

    def _check_joined(self, event: Event) -> None:
        if event.get("saves", True) or not all(lane < self.lanes for lane in event["lanes"]):
            raise ProtocolError("it claims to save, or lanes that the job does not have")
        self._step = event.step or 0

    def _advance(self, event: Event, last_step: int | None) -> bool:
        """Whether the worker is not behind an earlier row. ProtocolError if it counts more work than the job has."""
        step, most = event.step or 0, (last_step or 1 << 53) * self.lanes
        if event.get("steps", 1) > most or event.get("samples", 0) > most * self.batch_size:
            raise ProtocolError("it counts more work than the job has")
        behind, self._step = step < self._step, max(step, self._step)
        return not behind


def _bounded(name: str, value: Any) -> Any:
    """The value with printable texts and short lists. ProtocolError if it cannot be true."""
    if isinstance(value, str):
        return printable(value, limit=MAX_TEXT_CHARACTERS)
    if isinstance(value, list):
        return [_bounded(name, one) for one in value[:MAX_LIST_LENGTH]]
    if isinstance(value, dict):
        raise ProtocolError(f"'{name}' is not in the schema")
    is_time = name.endswith("_s") and not name.endswith("_bytes_s") and isinstance(value, int | float)
    if is_time and not 0 <= value <= MAX_ROW_SECONDS:
        raise ProtocolError(f"'{name}' is {value!r:.40}")
    return value
