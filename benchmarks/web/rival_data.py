"""PYTHON rival_data.py TOOL DIRECTORY RUNS POINTS SECONDS: write the same curves as the other sides, by the tool's own
writer, for at most so many seconds. Prints how many whole runs, and how many points, were written.

It is run by the Python of the tools' own environment, so it imports nothing of Shoal.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

AT_ONCE = 1000
STARTED_T = 1.7e9


def loss(step: int) -> float:
    """The same as in `benchmarks.web.steps`."""
    return 2.0 / step + (step * 7919 % 1000) / 5000


class Writer(Protocol):
    """Writes one run after the other."""

    def begin(self, run: int) -> None: ...
    def write(self, steps: range) -> None: ...
    def end(self) -> None: ...


class TensorBoard:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: Any = None

    def begin(self, run: int) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._file = EventFileWriter(str(self._directory / f"made-{run + 1}"))

    def write(self, steps: range) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for step in steps:
            summary = Summary(value=[Summary.Value(tag="loss", simple_value=loss(step))])
            self._file.add_event(Event(wall_time=STARTED_T + 0.05 * step, step=step, summary=summary))

    def end(self) -> None:
        self._file.close()


class MLflow:
    def __init__(self, directory: Path) -> None:
        from mlflow import MlflowClient  # type: ignore[import-not-found,unused-ignore]

        self._ids = directory / "ids"
        self._client = MlflowClient(f"sqlite:///{directory}/mlflow.db")
        self._experiment = self._client.create_experiment("made")
        self._run = ""

    def begin(self, run: int) -> None:
        self._run = self._client.create_run(self._experiment, run_name=f"made-{run + 1}").info.run_id
        self._ids.write_text(f"{self._experiment} {self._run}")

    def write(self, steps: range) -> None:
        from mlflow.entities import Metric  # type: ignore[import-not-found,unused-ignore]

        made = [Metric("loss", loss(step), int(1000 * (STARTED_T + 0.05 * step)), step) for step in steps]
        self._client.log_batch(self._run, metrics=made)

    def end(self) -> None:
        self._client.set_terminated(self._run)


class Trackio:
    def __init__(self, directory: Path) -> None:
        os.environ["TRACKIO_DIR"] = str(directory)
        from trackio.sqlite_storage import SQLiteStorage  # type: ignore[import-not-found,unused-ignore]

        self._storage = SQLiteStorage
        self._run = ""

    def begin(self, run: int) -> None:
        self._run = f"made-{run + 1}"

    def write(self, steps: range) -> None:
        self._storage.bulk_log("made", self._run, [{"loss": loss(step)} for step in steps], steps=list(steps))

    def end(self) -> None:
        """Each call has committed what it wrote."""


WRITERS: dict[str, Callable[[Path], Writer]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "trackio": Trackio}


def write_all(writer: Writer, *, runs: int, points: int, until_s: float) -> tuple[int, int]:
    """Returns whole runs, and points. The run that is written when the time is over is ended as it is."""
    written = 0
    for run in range(runs):
        writer.begin(run)
        for first in range(1, points + 1, AT_ONCE):
            if time.monotonic() >= until_s:
                writer.end()
                return run, written
            steps = range(first, min(first + AT_ONCE, points + 1))
            writer.write(steps)
            written += len(steps)
        writer.end()
    return runs, written


def main() -> None:
    tool, directory, runs, points, seconds = sys.argv[1:]
    until_s = time.monotonic() + float(seconds)
    print(*write_all(WRITERS[tool](Path(directory)), runs=int(runs), points=int(points), until_s=until_s))


if __name__ == "__main__":
    main()
