import pytest

from tests.jobs.disturbed import in_time


@pytest.fixture
def soon():
    """A minute, for tests that would otherwise wait for ever."""
    with in_time(60):
        yield
