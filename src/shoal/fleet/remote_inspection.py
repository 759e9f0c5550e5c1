"""Looking into a worker that cannot open the run's directory. The driver asks it over the control channel. What it
finds comes back in pieces, and the driver puts it where workers with the directory write it themselves."""

from __future__ import annotations

import base64
import contextlib
import faulthandler
import gzip
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from shoal.errors import ShoalError
from shoal.fleet.messages import MAX_PIECE_CHARACTERS, FoundMessage, InspectRequest, parse_user_request
from shoal.net.errors import ProtocolError
from shoal.spec.run_paths import RunPaths, write_atomically

MAX_STACKS_BYTES = 256 << 10
MAX_TRACE_BYTES = 4 << 20
"""Of one worker's compressed trace: what waits to be sent to the driver has a limit."""
MAX_OWED_ANSWERS = 16
_PIECE_BYTES = MAX_PIECE_CHARACTERS // 4 * 3


class Sender(Protocol):
    """The method of `ControlClient` that a worker uses."""

    def send(self, kind: str, **fields: Any) -> None: ...


class InspectedWorker:
    """The worker's side. The control client's thread calls `answer`, the training thread `send_trace`. So a worker
    whose training thread hangs answers too, unless it holds the lock of the interpreter."""

    def __init__(self, control: Sender, paths: RunPaths) -> None:
        self._control, self._paths = control, paths

    def answer(self, fields: Mapping[str, Any]) -> None:
        """ProtocolError if the driver asks for something else."""
        request = parse_user_request("inspect", fields)
        assert isinstance(request, InspectRequest)
        if request.profile is None:
            self._send("", own_stacks())
        else:
            write_atomically(self._paths.profile_request, request.profile.model_dump_json())

    def send_trace(self, name: str, trace: Path) -> None:
        """Send a trace and remove the file. ValueError if it is too large."""
        content = gzip.compress(trace.read_bytes(), 6)
        trace.unlink()
        if len(content) > MAX_TRACE_BYTES:
            raise ValueError(f"the compressed trace exceeds {MAX_TRACE_BYTES >> 20} MB: profile fewer steps")
        self._send(name, content)

    def _send(self, name: str, content: bytes) -> None:
        for start in range(0, len(content), _PIECE_BYTES):
            piece = base64.b64encode(content[start : start + _PIECE_BYTES]).decode()
            self._control.send("found", profile=name, piece=piece, is_last=start + _PIECE_BYTES >= len(content))


def own_stacks() -> bytes:
    """Where every thread of this process is."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        return file.read(MAX_STACKS_BYTES)


class InspectionDesk:
    """The driver's side; belongs to its thread. `send(seat, fields)` asks a worker. Nothing is taken that was not asked
    for. A directory that cannot be written is no error of the run: whoever asked learns that nothing came."""

    def __init__(self, paths: RunPaths, send: Callable[[int, dict[str, Any]], None]) -> None:
        self._paths, self._send = paths, send
        self._awaited: Counter[tuple[int, str]] = Counter()  # answers to come; a worker answers in its own time
        self._pieces: dict[tuple[int, str], bytearray] = {}

    def ask(self, request: InspectRequest, seats: list[int]) -> None:
        """Ask these workers. One that owes many answers is not asked again before it has given one."""
        name = request.profile.name if request.profile else ""
        for seat in seats:
            owed = sum(count for (other, _), count in self._awaited.items() if other == seat)
            if owed < MAX_OWED_ANSWERS:
                self._awaited[seat, name] += 1
                self._send(seat, request.model_dump(mode="json", exclude={"kind"}))

    def take(self, seat: int, message: FoundMessage) -> None:
        """ProtocolError if it was not asked for, or is too much."""
        key = seat, message.profile
        if not self._awaited[key]:
            raise ProtocolError("it sends stacks or a profile that nobody asked for")
        try:
            piece = base64.b64decode(message.piece, validate=True)
        except ValueError as failure:
            raise ProtocolError("it sends a piece that is not base64") from failure
        content = self._pieces.setdefault(key, bytearray())
        if len(content) + len(piece) > (MAX_TRACE_BYTES if message.profile else MAX_STACKS_BYTES):
            raise ProtocolError("its stacks or profile are too large")
        content += piece
        if message.is_last:
            del self._pieces[key]
            self._awaited[key] -= 1
            with contextlib.suppress(OSError, ShoalError):
                self._keep(seat, message.profile, content)

    def _keep(self, seat: int, profile: str, content: bytearray) -> None:
        if not profile:
            self._paths.logs.mkdir(exist_ok=True)
            with self._paths.stacks(seat).open("ab") as file:
                file.write(content)
            return
        target = self._paths.profiles / profile / f"worker-{seat}.json.gz"  # who asked has made the directory
        part = target.with_name(f".{target.name}.tmp")
        part.write_bytes(content)
        part.replace(target)
