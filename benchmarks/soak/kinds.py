"""The kinds of training that a soak disturbs: the job of each, its faults, and what its result is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LANES = 8
WORKER_FAULTS = ("kill worker", "kill worker", "freeze worker", "kill loader", "kill driver")
SCALING = ("join", "leave")

JOB = {
    "name": "soak",
    "task": "task.py:SleepingTask",
    "optimizer": {"name": "AdamW", "args": {"lr": 0.001}},
    "data": {
        "source": {"kind": "python", "factory": "task.py:NoisyDigits"},
        "split": {"kind": "holdout", "validation": 0.2},
        "loader": {"workers": 1},
    },
    "batch_size": 64,
    "lanes": LANES,
    "evaluate": {"every_steps": 500},
    "checkpoint": {"every": "10 seconds"},
    "export": [],
    "base_dir": str(HERE),
}


@dataclass(frozen=True)
class SoakKind:
    """`workers`: at the start and in the undisturbed run. `most_workers`: no join beyond it."""

    job: dict[str, Any]
    faults: tuple[str, ...]
    workers: int
    reference_workers: int
    compared_with: str
    most_workers: int = 5


KINDS = {
    "lanes": SoakKind(
        JOB,
        (*WORKER_FAULTS, *SCALING),
        workers=3,
        reference_workers=1,
        compared_with="the weights of one undisturbed worker after as many steps, to the bit",
    ),
    "servers": SoakKind(
        JOB | {"sync": {"kind": "server", "servers": 2, "backups": 1}},
        (*WORKER_FAULTS, *SCALING, "kill server", "kill server"),
        workers=3,
        reference_workers=1,
        compared_with="the weights of one undisturbed worker with undisturbed servers after as many steps, to the bit",
    ),
    "local": SoakKind(
        JOB | {"sync": {"kind": "local", "every": 4, "rounds_per_sync": 2, "fragments": 2}},
        (*WORKER_FAULTS, *SCALING),
        workers=3,
        reference_workers=1,
        compared_with="the weights of one undisturbed worker after as many steps, to the bit",
    ),
    "fsdp": SoakKind(
        JOB | {"shard": {"kind": "fsdp", "size": 2}},
        WORKER_FAULTS,
        workers=2,
        reference_workers=2,
        compared_with="the weights of an undisturbed run of the same layout, two workers with one replica, to the bit; "
        "sharding promises no bits for another layout, so no worker joins or leaves",
    ),
}
