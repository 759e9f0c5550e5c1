"""PYTHON rival_data.py TOOL DIRECTORY RUNS POINTS: write the same curves as the other sides, by the tool's own writer.

It is run by the Python of the tools' own environment, so it imports nothing of Shoal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

AT_ONCE = 1000
STARTED_T = 1.7e9


def loss(step: int) -> float:
    """The same as in `benchmarks.web.steps`."""
    return 2.0 / step + (step * 7919 % 1000) / 5000


def write_tensorboard(directory: Path, runs: int, points: int) -> None:
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped,unused-ignore]
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped,unused-ignore]
    from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped,unused-ignore]

    for run in range(runs):
        writer = EventFileWriter(str(directory / f"made-{run + 1}"))
        for step in range(1, points + 1):
            summary = Summary(value=[Summary.Value(tag="loss", simple_value=loss(step))])
            writer.add_event(Event(wall_time=STARTED_T + 0.05 * step, step=step, summary=summary))
        writer.close()


def write_mlflow(directory: Path, runs: int, points: int) -> None:
    from mlflow import MlflowClient  # type: ignore[import-not-found,unused-ignore]
    from mlflow.entities import Metric  # type: ignore[import-not-found,unused-ignore]

    client = MlflowClient(f"sqlite:///{directory}/mlflow.db")
    experiment = client.create_experiment("made")
    for run in range(runs):
        made = client.create_run(experiment, run_name=f"made-{run + 1}").info.run_id
        for first in range(1, points + 1, AT_ONCE):
            steps = range(first, min(first + AT_ONCE, points + 1))
            metrics = [Metric("loss", loss(step), int(1000 * (STARTED_T + 0.05 * step)), step) for step in steps]
            client.log_batch(made, metrics=metrics)
        client.set_terminated(made)
    Path(directory, "ids").write_text(f"{experiment} {made}")


def write_trackio(directory: Path, runs: int, points: int) -> None:
    os.environ["TRACKIO_DIR"] = str(directory)
    from trackio.sqlite_storage import SQLiteStorage  # type: ignore[import-not-found,unused-ignore]

    steps = list(range(1, points + 1))
    for run in range(runs):
        SQLiteStorage.bulk_log("made", f"made-{run + 1}", [{"loss": loss(step)} for step in steps], steps=steps)


WRITERS: dict[str, Callable[[Path, int, int], Any]] = {
    "tensorboard": write_tensorboard,
    "mlflow": write_mlflow,
    "trackio": write_trackio,
}

if __name__ == "__main__":
    WRITERS[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
