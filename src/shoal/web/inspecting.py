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


def list_profiles(call: Call) -> list[answers.ProfileRow]:
    return [
        answers.ProfileRow.model_validate(one.model_dump()) for one in profiles.list_profiles(call.paths)[:MAX_LISTED]
    ]


def send_trace(call: Call) -> Response:
    """A file to save, which no browser shows: its content comes from workers."""
    path = profiles.trace_file(call.paths, call.names["profile"])
    headers = {"content-disposition": f'attachment; filename="{call.names["profile"]}.trace.json.gz"'}
    return Response(path.read_bytes(), headers=headers, media_type="application/gzip")


def send_model(call: Call) -> Response:
    """The exported weights, as safetensors. SH606 before the run has finished."""
    path = call.paths.model / "model.safetensors"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        raise error("SH606", f"'{call.paths.name}' has no model of its own") from None
    file = os.fdopen(descriptor, "rb")
    headers = {
        "content-disposition": 'attachment; filename="model.safetensors"',
        "content-length": str(os.fstat(file.fileno()).st_size),
    }
    return StreamingResponse(_pieces(file), headers=headers, media_type="application/octet-stream")


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while piece := file.read(PIECE_BYTES):
            yield piece
