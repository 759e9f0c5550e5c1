"""The logs of workers and servers, which stay after their death: listing, reading in pieces, searching."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO, NamedTuple

from shoal.errors import error
from shoal.events.packed_file import SUFFIX, content_size, open_content
from shoal.spec.run_paths import RunPaths

MAX_PIECE_BYTES = 1 << 18
MAX_LOG_LINE = 4000
SEARCH_PIECE_BYTES = 1 << 22
_NAME = re.compile(r"(worker|server)-(\d{1,9})\.(log|err)")
_ESCAPE = re.compile("\x1b(?:\\[[0-?]*[ -/]*[@-~]|\\][^\x07\x1b]*(?:\x07|\x1b\\\\)|[@-Z\\\\-_])")
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


class LogFile(NamedTuple):
    """`name`: worker-1.log for standard output, worker-1.err for standard error."""

    name: str
    size_bytes: int


class LogPiece(NamedTuple):
    """Whole lines from byte `start` to byte `end` of a log of `size_bytes`."""

    start: int
    end: int
    size_bytes: int
    lines: list[str]


class LogMatch(NamedTuple):
    name: str
    offset: int
    line: str


def plain_line(line: bytes) -> str:
    """The line without commands to a terminal, and not longer than a screen can use."""
    text = line[: 4 * MAX_LOG_LINE].decode(errors="replace")
    return _CONTROL.sub("", _ESCAPE.sub("", text))[:MAX_LOG_LINE]


def list_logs(paths: RunPaths) -> list[LogFile]:
    """In the order of seats, workers before servers."""
    found = []
    with contextlib.suppress(OSError):
        for name in {entry.name.removesuffix(SUFFIX): entry for entry in os.scandir(paths.logs)}:
            if named := _NAME.fullmatch(name):
                with contextlib.suppress(OSError), _open_log(paths, name) as file:
                    order = named[1] == "server", int(named[2]), named[3] == "err"
                    found.append((order, LogFile(name, content_size(file))))
    return [log for _, log in sorted(found)]


def _open_log(paths: RunPaths, name: str) -> BinaryIO:
    """A log, packed or not. OSError if there is none. A link is not followed."""
    folder = os.open(paths.logs, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:

        def opened(path: Path) -> BinaryIO:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            return os.fdopen(os.open(path.name, flags, dir_fd=folder), "rb")

        return open_content(paths.logs / name, opened)
    finally:
        os.close(folder)


def open_log(paths: RunPaths, name: str) -> BinaryIO:
    """SH673 if the run has no such log. A link is not followed."""
    if not _NAME.fullmatch(name):
        raise error("SH673", f"'{name[:100]}' is not the name of a log", where=paths.name)
    try:
        return _open_log(paths, name)
    except OSError as failure:
        names = ", ".join(log.name for log in list_logs(paths))
        fix = f"It has: {names}." if names else "It has no logs."
        raise error("SH673", f"'{paths.name}' has no log {name}", where=paths.name, fix=fix) from failure


def read_tail(paths: RunPaths, name: str, *, lines: int) -> LogPiece:
    """The last lines, as far as one piece reaches."""
    with open_log(paths, name) as file:
        size = content_size(file)
        start = max(size - MAX_PIECE_BYTES, 0)
        file.seek(start)
        found = file.read(size - start)
    cut = found.find(b"\n") + 1 if start else 0
    kept = found[cut:].splitlines(keepends=True)[-lines:]
    return LogPiece(size - sum(map(len, kept)), size, size, [plain_line(row.rstrip(b"\r\n")) for row in kept])


def read_after(paths: RunPaths, name: str, *, offset: int) -> LogPiece:
    """The whole lines after an offset, as far as one piece reaches. A log that became shorter is read anew."""
    with open_log(paths, name) as file:
        size = content_size(file)
        start = offset if offset <= size else 0
        begin, stop = _kept_part(file, start, size)
        file.seek(begin)
        found = file.read(min(MAX_PIECE_BYTES, stop - begin))
    end = found.rfind(b"\n") + 1
    if not end and (len(found) == MAX_PIECE_BYTES or stop < size):
        end = len(found)  # one line that is longer than a piece, or whose end is not kept
    rows = found[:end].removesuffix(b"\n").split(b"\n") if end else []
    gap = [f"… {begin - start} bytes are not kept …"] if begin > start else []
    return LogPiece(start, begin + end, size, [*gap, *map(plain_line, rows)])


def _kept_part(file: BinaryIO, start: int, size: int) -> tuple[int, int]:
    """Where the next content begins, and where it ends: the middle of a long log is not kept."""
    try:
        begin = os.lseek(file.fileno(), start, os.SEEK_DATA)
        return begin, os.lseek(file.fileno(), begin, os.SEEK_HOLE)
    except OSError:  # it is packed, or at its end, or on a file system that does not know
        return start, size


def search(
    paths: RunPaths, names: list[str], *, text: str, at_most: int, is_over: Callable[[], bool] = lambda: False
) -> Iterator[LogMatch]:
    """Lines that contain a text, over all these logs. It ends early when `is_over` says so."""
    left = at_most
    for name in names:
        for match in _search_one(paths, name, text.encode(), is_over):
            if left == 0:
                return
            left -= 1
            yield match


def _search_one(paths: RunPaths, name: str, wanted: bytes, is_over: Callable[[], bool]) -> Iterator[LogMatch]:
    """Finds the text in whole pieces, and cuts out its line only then."""
    with open_log(paths, name) as file:
        base, rest = 0, b""
        for position, piece in takewhile(lambda _: not is_over(), _kept_pieces(file)):
            if position != base + len(rest):
                yield from _lines_with(rest, wanted, name, base)
                base, rest = position, b""
            piece = rest + piece
            end = piece.rfind(b"\n") + 1 or (len(piece) if len(piece) > 2 * SEARCH_PIECE_BYTES else 0)
            yield from _lines_with(piece[:end], wanted, name, base)
            base, rest = base + end, piece[end:]
        yield from _lines_with(rest, wanted, name, base)


def _kept_pieces(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """All content, with its positions."""
    size = content_size(file)
    end = 0
    while end < size:
        begin, stop = _kept_part(file, end, size)
        file.seek(begin)
        piece = file.read(min(SEARCH_PIECE_BYTES, stop - begin))
        if not piece:
            return
        yield begin, piece
        end = begin + len(piece)


def _lines_with(piece: bytes, wanted: bytes, name: str, base: int) -> Iterator[LogMatch]:
    at = piece.find(wanted)
    while at >= 0:
        start = piece.rfind(b"\n", 0, at) + 1
        end = piece.find(b"\n", at)
        end = len(piece) if end < 0 else end
        yield LogMatch(name, base + start, plain_line(piece[start:end]))
        at = piece.find(wanted, end)


def names_of(paths: RunPaths, who: str) -> list[str]:
    """The logs of a worker or server; of all if `who` is ''. SH673 if there are none."""
    names = [log.name for log in list_logs(paths)]
    chosen = [name for name in names if not who or Path(name).stem == who or name == who]
    if not chosen:
        fix = f"It has: {', '.join(names)}." if names else "Workers write logs when they print something."
        raise error("SH673", f"'{paths.name}' has no log{f' of {who}' if who else 's'}", where=paths.name, fix=fix)
    return chosen
