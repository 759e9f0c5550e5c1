"""Runs on a disk of a few megabytes that fills. Started by `unshare -rm`, so that it may mount the disk:

python -m tests.jobs.small_disk DIRECTORY

Prints one JSON object: what each run said, and what it left on the disk.
"""

import json
import subprocess
import sys
from pathlib import Path

from shoal.checkpoint.files import is_temp
from shoal.events import EventReader, EventWriter, read_events, stream
from shoal.jobs import run_executor
from shoal.jobs.fork_servers import make_fork_server
from shoal.spec.load import make_job
from shoal.spec.run_paths import RunPaths
from tests.conftest import FIXTURES, MLP
from tests.fixtures.faults import FullDisk

JOB = MLP | {
    "model": {"name": "models.py:mlp", "args": {"inputs": 64, "classes": 10, "hidden": 256}},
    "metrics": [],
    "steps": 40,
    "evaluate": {"every_steps": 100},
    "checkpoint": {"every": "5 steps", "keep": 100},  # a checkpoint that is deleted late would make room
}


def main():
    disk = Path(sys.argv[1])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], check=True)
    filler = disk / "filler"
    with make_fork_server(1, modules=["sklearn.datasets", "sklearn.model_selection"]) as fork_server:

        def run(name, **changes):
            job = make_job(JOB | changes | {"name": name}, base_dir=str(FIXTURES))
            return summary(run_executor.run(job, runs=disk, fork_server=fork_server), disk)

        def full(**when):
            return {"name": "faults.py:FullDisk", "args": {"path": str(filler), **when}}

        found = {
            "undisturbed": run("undisturbed"),
            "for a while": run("while", watchers=[full(since=12, until=28)]),
            "to the end": run("end", watchers=[full(since=12)]),
        }
        filler.unlink()
        paths = RunPaths.at(disk / "end-1")
        found["resumed"] = summary(run_executor.resume(paths, overrides=["watchers=[]"], fork_server=fork_server), disk)
    found["events"] = write_events(disk, filler)
    print(json.dumps(found))


def write_events(disk, filler):
    """Two writers share a file while the disk is full for a time."""
    path = disk / "events.jsonl"
    writers = [EventWriter(path, f"worker-{number}", flush_s=0) for number in range(2)]
    stream.MAX_PENDING_BYTES, stream.RETRY_S = 1 << 15, 0.0
    for step in range(3_000):
        if step in (1_000, 1_100):
            FullDisk(filler, 0)._fill()
        if step == 2_500:
            filler.unlink()
        writers[step % 2].emit("step", step=step, loss=1.0)
        if step == 1_500:
            writers[0].emit("note", message="important")
    for writer in writers:
        writer.close()
    reader = EventReader(path)
    events = list(reader.read_new())
    return {
        "steps": [e.step for e in events if e.kind == "step"],
        "notes": [e["message"] for e in events if e.kind == "note"],
        "damaged": reader.skipped_rows,
        "unwritten": [writer.unwritten_rows for writer in writers],
    }


def summary(outcome, disk):
    events = list(read_events(outcome.paths.events))
    return {
        "status": outcome.status,
        "error": outcome.error and outcome.error.to_fields(),
        "exit": outcome.exit_code,
        "weights": outcome.receipt and outcome.receipt.weights_sha256,
        "save_failed": [e.step for e in events if e.kind == "save_failed"],
        "save_skipped": [e.step for e in events if e.kind == "save_skipped"],
        "saved": [e.step for e in events if e.kind == "saved"],
        "recovered": [e.step for e in events if e.kind == "saved" and e.get("recovered")],
        "notes": [e["message"] for e in events if e.kind == "note"],
        "temporary": [str(path) for path in disk.rglob("*") if is_temp(path.name)],
    }


if __name__ == "__main__":
    main()
