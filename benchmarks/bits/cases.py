"""The jobs whose bits must stay: every strategy, every codec, kills and resumes. Written in today's field names."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

MLP: dict[str, Any] = {
    "model": "models.py:mlp",
    "loss": "CrossEntropyLoss",
    "metrics": ["accuracy"],
    "optimizer": {"name": "SGD", "args": {"lr": 0.05, "momentum": 0.9}},
    "data": {"source": {"kind": "sklearn", "name": "digits"}, "split": {"kind": "holdout", "validation": 0.2}},
    "batch_size": 50,
    "steps": 40,
    "lanes": 4,
    "evaluate": {"every_steps": 15},
    "checkpoint": {"every": "10 steps"},
    "export": [],
}
CNN = MLP | {
    "model": "models.py:cnn",
    "optimizer": {"name": "AdamW", "args": {"lr": 0.002}},
    "schedule": {"name": "OneCycleLR", "args": {"max_lr": 0.01, "total_steps": "steps"}},
    "clip": {"norm": 1.0},
    "data": MLP["data"] | {"augment": "models.py:shift", "transform": "models.py:as_image"},
    "lanes": 3,
}
GPT = MLP | {
    "model": "models.py:GPT",
    "metrics": [],
    "optimizer": {"name": "AdamW", "args": {"lr": 0.003}},
    "schedule": {"name": "CosineAnnealingLR", "args": {"T_max": "steps"}},
    "clip": {"norm": 0.5},
    "data": {
        "source": {"kind": "text", "path": "text.txt", "context": 16},
        "split": {"kind": "holdout", "validation": 0.1},
    },
    "batch_size": 24,
    "steps": 24,
}
WORDS = MLP | {"model": "models.py:Words", "optimizer": {"name": "AdamW", "args": {"lr": 0.01}}, "steps": 24}
CODECS: tuple[dict[str, Any], ...] = (
    {"kind": "bf16"},
    {"kind": "fp16"},
    {"kind": "int8"},
    {"kind": "int4"},
    {"kind": "int3"},
    {"kind": "sign"},
    {"kind": "topk", "keep": 0.05, "momentum": 0.5},
    {"kind": "lowrank", "rank": 2},
)
LOCAL = {"kind": "local", "every": 4, "rounds_per_sync": 2, "fragments": 2}


@dataclass(frozen=True)
class Case:
    """A job, run to its end. `kills`: at each of these steps one worker is killed. `interrupted`: all workers are
    killed there and none is restarted, so that the run must be resumed by hand."""

    name: str
    job: dict[str, Any]
    kills: tuple[int, ...] = ()
    interrupted: bool = False
    changes: dict[str, Any] = field(default_factory=dict)

    def written(self, marks: str) -> dict[str, Any]:
        job = copy.deepcopy(self.job) | copy.deepcopy(self.changes)
        if self.kills:
            args = {"steps": list(self.kills), "marks": "" if self.interrupted else marks}
            job["watchers"] = [{"name": "models.py:KillAt", "args": args}]
            job["elastic"] = {"restarts": 0 if self.interrupted else 9}
        return job


def server(servers: int, backups: int, staleness: int = 0) -> dict[str, Any]:
    return {"kind": "server", "servers": servers, "backups": backups, "staleness": staleness}


def cases() -> list[Case]:
    made = [
        Case(f"lanes {name}, {workers} workers", job, changes={"workers": workers})
        for name, job in (("mlp", MLP), ("cnn", CNN), ("gpt", GPT))
        for workers in (1, 2, 3)
    ]
    for codec in CODECS:
        made.append(Case(f"codec {codec['kind']}, 2 workers", GPT, changes={"codec": codec, "workers": 2}))
    made += [
        Case("codec int4, 1 worker", GPT, changes={"codec": {"kind": "int4"}, "workers": 1}),
        Case("ddp cnn, 2 workers", CNN, changes={"sync": "ddp", "workers": 2, "lanes": 2}),
        Case("local mlp, 1 worker", MLP, changes={"sync": LOCAL}),
        Case("local mlp, 2 workers", MLP, changes={"sync": LOCAL, "workers": 2}),
        Case("local gpt int4, 3 workers", GPT, changes={"sync": LOCAL, "workers": 3, "codec": {"kind": "int4"}}),
        Case("servers cnn, 2 workers, 1 server", CNN, changes={"sync": server(1, 0), "workers": 2}),
        Case("servers gpt, 2 workers, 2 servers", GPT, changes={"sync": server(2, 1), "workers": 2}),
        Case("servers gpt int8", GPT, changes={"sync": server(2, 1), "workers": 2, "codec": {"kind": "int8"}}),
        Case("sparse tables, 1 worker", WORDS, changes={"sync": server(1, 0)}),
        Case("sparse tables, 2 workers", WORDS, changes={"sync": server(2, 1), "workers": 2}),
        Case("fsdp over 2", GPT, changes={"shard": {"kind": "fsdp", "size": 2}, "workers": 2}),
        Case("fsdp over 2, 4 workers", MLP, changes={"shard": {"kind": "fsdp", "size": 2}, "workers": 4}),
        Case(
            "tensor over 2",
            MLP,
            changes={"shard": {"kind": "tensor", "patterns": "mlp", "size": 2}, "workers": 2},
        ),
        Case(
            "pipeline over 2",
            GPT,
            changes={"shard": {"kind": "pipeline", "microbatches": 2, "size": 2}, "workers": 2},
        ),
        Case(
            "folds",
            MLP,
            changes={"data": MLP["data"] | {"split": {"kind": "kfold", "folds": 3}}, "steps": 20},
        ),
        Case("kills lanes cnn, 3 workers", CNN, kills=(7, 19, 30), changes={"workers": 3}),
        Case("kills int8 gpt", GPT, kills=(5, 13), changes={"workers": 2, "codec": {"kind": "int8"}}),
        Case("kills local", MLP, kills=(11, 26), changes={"sync": LOCAL, "workers": 2}),
        Case("kills servers", GPT, kills=(5, 15), changes={"sync": server(2, 1), "workers": 2}),
        Case("kills fsdp", MLP, kills=(12,), changes={"shard": {"kind": "fsdp", "size": 2}, "workers": 2}),
    ]
    return made + resumed()


def resumed() -> list[Case]:
    """Runs that end in a crash after a checkpoint, and are resumed: by the same code, or by later code."""
    data = MLP["data"]
    return [
        Case("resume lanes cnn", CNN, kills=(25,), interrupted=True),
        Case("resume int4 gpt", GPT, kills=(15,), interrupted=True, changes={"codec": {"kind": "int4"}}),
        Case("resume local", MLP, kills=(24,), interrupted=True, changes={"sync": LOCAL}),
        Case("resume servers", GPT, kills=(15,), interrupted=True, changes={"sync": server(1, 0)}),
        Case("resume sparse tables", WORDS, kills=(15,), interrupted=True, changes={"sync": server(1, 0)}),
        Case(
            "resume fsdp",
            MLP,
            kills=(25,),
            interrupted=True,
            changes={"shard": {"kind": "fsdp", "size": 2}, "workers": 2},
        ),
        Case(
            "resume balanced",
            MLP,
            kills=(25,),
            interrupted=True,
            changes={"data": data | {"sampler": {"kind": "hash"}}},
        ),
    ]
