"""`checkpoint: {frozen: false}`: neither checkpoints nor a joining worker's state contain frozen parameters."""

import pytest

from shoal.checkpoint.export import load_weights
from shoal.errors import ShoalError
from shoal.jobs import run_index
from shoal.lanes.replica import Replica
from shoal.spec.load import load_run_job, make_job
from tests.conftest import MLP

HEAD = MLP | {
    "steps": 20,
    "evaluate": {"every_steps": 20},
    "init_from": {"freeze": ["*"], "unfreeze": ["3"]},
}
SAVED = {"every": "1 steps", "frozen": False}


def test_kills_and_workers_change_nothing(run, job_dir):
    whole = run(HEAD, checkpoint={"every": "1 steps"})
    kill = {"name": "faults.py:KillAt", "args": {"steps": [9], "marks": str(job_dir)}}
    torn = run(HEAD, checkpoint=SAVED, watchers=[kill])
    two = run(HEAD, checkpoint=SAVED, workers=2, watchers=[kill | {"args": kill["args"] | {"steps": [5]}}])
    assert (torn.receipt.deaths_survived, two.receipt.deaths_survived) == (1, 1)
    assert whole.receipt.weights_sha256 == torn.receipt.weights_sha256 == two.receipt.weights_sha256
    sizes = [sum(f.stat().st_size for f in one.paths.checkpoints.rglob("*") if f.is_file()) for one in (whole, torn)]
    assert sizes[1] < sizes[0]
    saved = load_weights(str(torn.paths.checkpoints))
    assert sorted(saved) == ["3.bias", "3.weight"]
    assert len(load_weights(torn.paths.model)) > 2  # the model itself is whole
    with pytest.raises(ShoalError) as refused:
        run_index.find_weights(torn.paths, load_run_job(torn.paths.job), best=True)
    assert refused.value.code == "SH803"


def test_other_frozen_weights_are_refused():
    import torch
    from torch import nn

    def replica(value):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        nn.init.constant_(model[0].weight, value)
        nn.init.constant_(model[0].bias, 0.0)
        model[0].requires_grad_(False)
        made = Replica(model, torch.optim.SGD(model[1].parameters(), lr=0.1), lambda m, b: m(b).sum(), seed=1)
        made.saves_frozen = False
        return made

    state = replica(1.0).state()
    assert list(state["model"]) == ["1.weight", "1.bias"]  # what is saved, and sent to a worker that joins
    replica(1.0).load_state(state)
    with pytest.raises(ShoalError) as refused:
        replica(2.0).load_state(state)
    assert refused.value.code == "SH803"


def test_servers_and_shards_save_everything(job_dir):
    with pytest.raises(ShoalError) as refused:
        make_job(HEAD | {"checkpoint": SAVED, "sync": "server"}, base_dir=job_dir)
    assert refused.value.code == "SH110"
