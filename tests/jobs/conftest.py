import shutil

import pytest

from shoal.jobs.fork_servers import make_fork_server
from tests.jobs.fault_injection import time_limit


@pytest.fixture
def limited_time():
    """A minute, for tests that would otherwise wait for ever."""
    with time_limit(60):
        yield


@pytest.fixture
def copied_job_dir(job_dir, tmp_path_factory):
    """A copy of the job's files, as another machine would have it."""
    there = tmp_path_factory.mktemp("elsewhere") / "copy"
    shutil.copytree(job_dir, there, ignore=shutil.ignore_patterns("runs"))
    return there


@pytest.fixture(scope="module")
def second_fork_server(cache):
    """A fork server belongs to one thread; the run's driver has the other."""
    with make_fork_server(1, modules=["torchmetrics", "sklearn.datasets", "sklearn.model_selection"]) as made:
        yield made
