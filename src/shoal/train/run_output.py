"""Where a worker puts checkpoints, the model and the trace: into the run's directory, or through the driver."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from shoal.checkpoint.driver_files import DriverConnections, DriverFiles
from shoal.checkpoint.files import CheckpointFiles
from shoal.checkpoint.model_check import MODEL_INFO
from shoal.spec.job import Job
from shoal.spec.run_paths import RunPaths

CHUNK_BYTES = 1 << 20


class RunOutput(Protocol):
    """`paths` is a directory that this worker can write: the run's, or its own."""

    paths: RunPaths

    @property
    def namespace(self) -> str:
        """The name of the run's checkpoints in a store that runs share."""

    def store(self, job: Job) -> str | CheckpointFiles: ...

    def append_trace(self, line: str) -> None: ...

    def publish_model(self) -> None:
        """The model is complete in `paths.model`: let the run have it."""


class DirectoryOutput:
    """The worker can open the run's directory."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths

    @property
    def namespace(self) -> str:
        return self.paths.checkpoint_namespace

    def store(self, job: Job) -> str:
        return self.paths.store(job.checkpoint.path)

    def append_trace(self, line: str) -> None:
        with self.paths.trace.open("a", encoding="utf-8") as file:
            file.write(line)

    def publish_model(self) -> None:
        pass


@dataclass
class DriverOutput:
    """The worker has a directory of its own, and sends what must last to the driver. Checkpoints at a URL go there
    directly."""

    paths: RunPaths
    connections: DriverConnections
    store_name: str
    namespace: str

    def store(self, job: Job) -> str | CheckpointFiles:
        where = job.checkpoint.path
        if where and "://" in where:
            return f"{where.rstrip('/')}/{self.store_name}"
        return DriverFiles(self.connections, "checkpoints")

    def append_trace(self, line: str) -> None:
        DriverFiles(self.connections, "trace").append("trace.jsonl", line.encode())

    def publish_model(self) -> None:
        """model.json is removed first and sent last: if it exists, the files that it describes are complete."""
        files = DriverFiles(self.connections, "model")
        names = sorted(file.name for file in self.paths.model.iterdir() if file.is_file())
        files.remove(MODEL_INFO)
        for name in sorted(names, key=lambda one: one == MODEL_INFO):
            with (self.paths.model / name).open("rb") as file:
                files.write(name, _chunks(file))


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk
