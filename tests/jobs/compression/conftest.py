"""A parent that is cheap to train, and a way to compress it."""

import hashlib

import pytest
import torch
from safetensors.torch import load_file

from shoal import api
from shoal.compression.onnx_files import OnnxModel
from shoal.compression.packed_file import read_packed
from shoal.data.datasets import open_datasets
from shoal.jobs.compression.compress import CompressRequest, compress
from shoal.spec.compression.config import CompressConfig
from shoal.spec.load import load_run_job
from shoal.spec.run_paths import cache_directory
from tests.conftest import MLP

PARENT = MLP | {
    "name": "parent",
    "model": {"name": "compressible.py:half_dead", "args": {"inputs": 64, "classes": 10}},
    "optimizer": {"name": "Adam", "args": {"lr": 0.01}},
    "data": MLP["data"] | {"split": {"kind": "holdout", "validation": 0.2, "test": 0.2}},
    "best": {"metric": "accuracy"},
    "lanes": 2,
}


@pytest.fixture
def compressed(job_dir, fork_server):
    """Compress a run; returns what came out."""

    def go(parent, *, workers=None, **config):
        request = CompressRequest(parent.paths, job_dir / "runs", workers=workers)
        return compress(request, CompressConfig.model_validate(config), fork_server=fork_server)

    return go


def accuracy_of_file(made, file, part):
    """The share of right classes of a file on disk, counted without the ladder."""
    job = load_run_job(made.paths.job)
    data = open_datasets(job.data, seed=job.seed, base_dir=job.base_dir, cache_dir=cache_directory())
    split = data.held_out[part]
    batch = split.source.take(split.ids)
    batch = split.transform(batch) if split.transform else batch
    if file.suffix == ".onnx":
        model = OnnxModel(file)
    else:
        model = api.load(made.paths.root)
        model.load_state_dict(read_packed(file) if file.suffix == ".packed" else load_file(file))
    with torch.no_grad():
        return int((model(*batch.inputs).argmax(1) == batch.target).sum()) / batch.size


def digests(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
