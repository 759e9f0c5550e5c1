import copy

import pytest

from shoal.jobs.queue.queue_file import QueuePaths
from shoal.jobs.queue.queue_store import QueueStore
from shoal.spec.load import make_job
from tests.conftest import MLP

SMALL = MLP | {"metrics": [], "evaluate": {"every_steps": 1000}, "self_check": 0.0}


@pytest.fixture
def paths(tmp_path):
    return QueuePaths.of(tmp_path / "runs")


@pytest.fixture
def store(paths):
    with QueueStore(paths) as made:
        yield made


@pytest.fixture
def job(job_dir):
    """A checked job; keyword arguments replace top-level fields."""

    def make(**changes):
        return make_job(copy.deepcopy(SMALL) | changes, base_dir=str(job_dir))

    return make
