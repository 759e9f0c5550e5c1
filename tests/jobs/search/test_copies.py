"""A copy of a checkpoint: the same state, other values, and no bytes."""

import copy
import json
import os

import pytest
import torch
from torch import nn

from shoal.checkpoint.manifest import Manifest, list_manifests
from shoal.checkpoint.state_tree import flatten, unflatten
from shoal.jobs.run_executor import open_executor
from shoal.jobs.search.copies import copy_checkpoint, with_values
from shoal.spec.load import make_job
from shoal.spec.run_paths import RunPaths
from shoal.tasks.optimizer import build_optimizer
from tests.conftest import MLP

JOB = MLP | {"steps": 12, "evaluate": {"every_steps": 4}, "lanes": 2}
SCHEDULE = {"schedule": {"name": "CosineAnnealingLR", "args": {"T_max": "steps"}}}


def optimizer(lr, betas=(0.9, 0.999)):
    return {"optimizer": {"name": "AdamW", "args": {"lr": lr, "betas": list(betas)}}}


@pytest.fixture
def train(fork_server, job_dir):
    """Trains a job in a directory of this name."""
    with open_executor(fork_server) as executor:

        def go(name, job, until=None):
            paths = RunPaths.at(job_dir / name)
            handle = executor.submit(job, runs=job_dir, reserved=paths, until=until)
            executor.run_until_done(handle)
            assert handle.result().error is None
            return handle.result()

        yield go


@pytest.fixture
def make(job_dir):
    return lambda **changes: make_job(copy.deepcopy(JOB) | changes, base_dir=str(job_dir))


def groups(paths):
    """The parameter groups in the first checkpoint, as plain pairs."""
    tree = list_manifests(paths.checkpoints)[-1].tree
    found = []

    def walk(node):
        for part in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            walk(part)
        if isinstance(node, list) and len(node) == 2 and node[0] == "param_groups":
            found.append(json.dumps(node[1]))

    walk(tree)
    return found


def grouped(lr, decay, head_lr):
    groups = [{"match": "*.bias", "args": {"weight_decay": 0.0}}, {"match": "2", "args": {"lr": head_lr}}]
    return {"optimizer": {"name": "AdamW", "args": {"lr": lr, "weight_decay": decay}, "groups": groups}}


def test_each_group_of_parameters_gets_its_own_values(make):
    """One group has a learning rate of its own, another one no weight decay; a schedule has halved the rates twice."""
    old, new = make(**grouped(0.01, 0.1, 0.5)), make(**grouped(0.02, 0.2, 0.25))
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    made = build_optimizer(old.optimizer, model, base_dir=old.base_dir)
    schedule = torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
    for _ in range(2):
        made.step()
        schedule.step()
    tensors, tree = flatten({"optimizer": made.state_dict(), "schedule": schedule.state_dict()})
    found = Manifest(step=2, created=0.0, job_sha256=None, metric=None, tree=tree, blobs={}, tensors={})
    state = unflatten(tensors, with_values(found, old, new).tree)
    changed = state["optimizer"]["param_groups"]
    assert [group["lr"] for group in changed] == pytest.approx([0.005, 0.005, 0.0625])
    assert [group["initial_lr"] for group in changed] == pytest.approx([0.02, 0.02, 0.25])
    assert [group["weight_decay"] for group in changed] == [0.2, 0.0, 0.2]
    assert state["schedule"]["base_lrs"] == pytest.approx([0.02, 0.02, 0.25])


@pytest.mark.long
def test_a_copy_with_the_same_values_ends_with_the_same_bits(train, make, job_dir):
    job = make(**optimizer(0.01), **SCHEDULE)
    whole, source = train("whole", job), train("source", job, until=4)
    target = RunPaths.at(job_dir / "copied")
    copy_checkpoint(job, target, source=source.paths, step=4)
    blobs = [file for file in target.checkpoints.rglob("blobs/*/*") if file.is_file()]
    assert blobs
    assert all(os.stat(file).st_nlink == 2 for file in blobs)
    assert train("copied", job).receipt.state_sha256 == whole.receipt.state_sha256


@pytest.mark.long
def test_a_copy_trains_on_with_its_own_values(train, make, job_dir):
    old, new = make(**optimizer(0.01), **SCHEDULE), make(**optimizer(0.02, (0.8, 0.99)), **SCHEDULE)
    source, target = train("source", old, until=4), RunPaths.at(job_dir / "copied")
    copy_checkpoint(new, target, source=source.paths, step=4)
    (before,), (after,) = groups(source.paths), groups(target)
    lr = [dict(json.loads(text)[0]["dict"])["lr"] for text in (before, after)]
    assert lr[1] == pytest.approx(2 * lr[0])
    assert '{"tuple": [0.8, 0.99]}' in after
    copied = train("copied", new)
    assert copied.receipt.weights_sha256 != train("alone", old).receipt.weights_sha256
