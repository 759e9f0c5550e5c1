import shutil

import pytest

from shoal.jobs.run import make_nursery
from tests.jobs.disturbed import in_time


@pytest.fixture
def soon():
    """A minute, for tests that would otherwise wait for ever."""
    with in_time(60):
        yield


@pytest.fixture
def elsewhere(place, tmp_path_factory):
    """A copy of the job's files, as another machine would have it."""
    there = tmp_path_factory.mktemp("elsewhere") / "copy"
    shutil.copytree(place, there, ignore=shutil.ignore_patterns("runs"))
    return there


@pytest.fixture(scope="module")
def their_nursery(cache):
    """A nursery belongs to one thread; the run's driver has the other."""
    with make_nursery(1, modules=["torchmetrics", "sklearn.datasets", "sklearn.model_selection"]) as made:
        yield made
