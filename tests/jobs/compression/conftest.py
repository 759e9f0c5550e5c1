"""A parent that is cheap to train, and a way to compress it."""

import hashlib

import pytest

from shoal.jobs.compression.compress import CompressRequest, compress
from shoal.spec.compression.config import CompressConfig
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


def digests(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
