"""Routes that send files of a run: traces of profiles, and the model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import BinaryIO

from starlette.responses import Response, StreamingResponse

from shoal.errors import error
from shoal.jobs.inspection import profiles
from shoal.web import work_answers as answers
from shoal.web.table import Call

MAX_LISTED = 50
PIECE_BYTES = 1 << 18
FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


def list_profiles(call: Call) -> list[answers.ProfileRow]:
    return [
        answers.ProfileRow.model_validate(one.model_dump()) for one in profiles.list_profiles(call.paths)[:MAX_LISTED]
    ]


def send_trace(call: Call) -> Response:
    """A file to save, which no browser shows: its content comes from workers."""
    path = profiles.trace_file(call.paths, call.names["profile"])
    return _send_file(os.open(path, FLAGS), path.name, media_type="application/gzip")


def send_model(call: Call) -> Response:
    """The exported weights, as safetensors. SH606 before the run has finished."""
    path = call.paths.model / "model.safetensors"
    try:
        descriptor = os.open(path, FLAGS)
    except OSError:
        raise error("SH606", f"'{call.paths.name}' has no model of its own") from None
    return _send_file(descriptor, path.name, media_type="application/octet-stream")


def _send_file(descriptor: int, name: str, *, media_type: str) -> Response:
    """In pieces: a file may be larger than the memory of the server."""
    file = os.fdopen(descriptor, "rb")
    headers = {
        "content-disposition": f'attachment; filename="{name}"',
        "content-length": str(os.fstat(file.fileno()).st_size),
    }
    return StreamingResponse(_pieces(file), headers=headers, media_type=media_type)


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while piece := file.read(PIECE_BYTES):
            yield piece
