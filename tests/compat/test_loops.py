"""Optimizers and loops that users bring: the same bits on 1 and 2 workers, through a kill, and after a resume."""

import pytest

from tests.compat.same_bits import assert_same_bits
from tests.conftest import MLP

pytestmark = pytest.mark.compat

SHORT = MLP | {"steps": 10, "evaluate": {"every_steps": 5}, "lanes": 3}
BARE = {name: value for name, value in SHORT.items() if name not in ("model", "loss", "metrics", "evaluate")}
DATASET = {"kind": "python", "factory": "loops.py:Images"}
DCGAN = BARE | {"task": "loops.py:Dcgan", "data": {"source": DATASET}, "batch_size": 12}
WORDS = BARE | {
    "task": "loops.py:WordLanguageModel",
    "data": {"source": {"kind": "python", "factory": "loops.py:Columns"}, "sampler": {"kind": "random", "shuffle": False}},
    "batch_size": 8,
    "lanes": 4,
    "steps": 24,
    "clip": {"norm": 0.25},
    "optimizer": {"name": "SGD", "args": {"lr": 1.0}},
}
ACTOR_CRITIC = BARE | {
    "task": "loops.py:ActorCritic",
    "data": {"source": {"kind": "python", "factory": "loops.py:Episodes"}},
    "batch_size": 10,
}

JOBS = {
    "dcgan": DCGAN,
    "word language model": WORDS,
    "actor-critic": ACTOR_CRITIC,
    "lbfgs": SHORT | {"optimizer": {"name": "LBFGS", "args": {"lr": 0.1, "max_iter": 4, "line_search_fn": "strong_wolfe"}}},
    "ema": SHORT | {"average": {"kind": "ema", "decay": 0.9}},
    "swa": SHORT | {"average": {"kind": "swa", "start": 4, "every": 2}},
    "bf16": SHORT | {"precision": "bf16"},
    "fp16": SHORT | {"precision": "fp16"},
    "accumulate": SHORT | {"lanes": 2, "accumulate": 2},
    "gradient checkpointing": SHORT | {"model": "loops.py:Blocks", "gradient_checkpointing": ["blocks.*"]},
    "lazy": SHORT | {"model": "loops.py:lazy"},
    "groups": SHORT
    | {
        "optimizer": {
            "name": "AdamW",
            "args": {"lr": 0.01},
            "groups": [{"match": "first", "args": {"lr": 0.001}}, {"match": "blocks.0.*", "args": {"lr": 0.003}}],
        },
        "model": "loops.py:Blocks",
    },
    "device exchange": SHORT | {"model": "loops.py:Blocks", "sync": {"kind": "lanes", "exchange": "device"}},
}


@pytest.mark.parametrize("name", JOBS)
def test_the_same_bits_through_everything(name, run, resume, job_dir):
    assert_same_bits(run, resume, JOBS[name], job_dir)
