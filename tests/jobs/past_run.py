"""The directory of a run that has finished, written without training, and verbs of the command line in this process."""

import copy
import sys

from shoal import cli
from shoal.events import Event
from shoal.events.run_state import replay
from shoal.events.stream import format_event
from shoal.jobs.receipt import make_receipt
from shoal.spec.load import make_job, save_job
from shoal.spec.run_paths import RunPaths
from tests.conftest import MLP

STARTED_T = 1.7e9
BUILT = {
    "steps": 60, "steps_per_epoch": 29, "lanes": 4, "samples": {"train": 1438, "validation": 359}, "skipped": 0,
    "device": "cpu", "parameters": 2410, "trainable": 2410,
}  # fmt: skip
FINISHED = {
    "weights_sha256": "ab" * 32, "state_sha256": "cd" * 32, "samples_seen": 3000, "metrics": {"accuracy": 0.5},
    "stopped": "", "platform": {"machine": "x86_64"},
}  # fmt: skip
TOLD = [
    ("run_started", "driver", None, {"run": "mlp-1", "pid": 7, "listens": "127.0.0.1:4000", "schema": 2}),
    ("worker_started", "worker-0", None, {"pid": 8, "host": "here", "threads": 1, "torch": "2.5"}),
    ("built", "worker-0", None, BUILT),
    ("joined", "worker-0", 0, {"lanes": [0, 1, 2, 3], "view": 1, "saves": True}),
    *(("step", "worker-0", n, {"loss": 2.3 / n, "samples": 50, "wall_s": 0.01}) for n in range(1, 61)),
    ("evaluated", "worker-0", 60, {"split": "validation", "metrics": {"accuracy": 0.5, "loss": 0.7}}),
    ("best", "worker-0", 60, {"metric": "accuracy", "value": 0.5}),
    ("saved", "worker-0", 60, {"size_bytes": 9000, "written_bytes": 9000}),
    ("note", "worker-0", 60, {"message": "weights from a file"}),
    ("finished", "worker-0", 60, FINISHED),
    ("run_ended", "driver", None, {"status": "finished"}),
]


def told_events(told=TOLD):
    return [Event(kind, STARTED_T + n, who, step, dict(fields)) for n, (kind, who, step, fields) in enumerate(told)]


def write_run(root, told=TOLD):
    """A finished run; its events are `told`."""
    paths = RunPaths.at(root)
    paths.root.mkdir(parents=True)
    job = make_job(copy.deepcopy(MLP), base_dir=str(root), check_names=False)
    save_job(job, paths.job)
    paths.events.write_bytes(b"".join(map(format_event, told_events(told))))
    receipt = make_receipt(job, replay(told_events()), run=paths.name)
    paths.receipt.write_text(receipt.model_dump_json(indent=2) + "\n")
    return paths


def call_verb(capsys, monkeypatch, *words):
    """The exit code, standard output and standard error of a command."""
    monkeypatch.setattr(sys, "argv", ["shoal", *map(str, words)])
    capsys.readouterr()
    try:
        cli.main()
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    return code, out, err
