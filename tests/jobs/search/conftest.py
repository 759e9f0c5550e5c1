import copy

import pytest

from shoal.jobs.search.driver import resume_search, run_search
from shoal.spec.load import make_job
from tests.conftest import MLP
from tests.jobs.fault_injection import processes_of, time_limit

SPACE = {"optimizer.args.lr": {"low": 1e-4, "high": 1e-1, "log": True}, "batch_size": [16, 32]}
SEARCH = {
    "space": SPACE,
    "metric": "accuracy",
    "policy": {"kind": "full", "sampler": "random"},
    "budget": "4 trials",
    "slots": 2,
}
SMALL = MLP | {"name": "small", "steps": 12, "evaluate": {"every_steps": 4}, "lanes": 2, "search": SEARCH}


@pytest.fixture(autouse=True)
def limited_time():
    with time_limit(900):
        yield


@pytest.fixture
def make(job_dir):
    def go(search=None, **changes):
        data = copy.deepcopy(SMALL) | changes
        return make_job(data | {"search": data["search"] | (search or {})}, base_dir=str(job_dir))

    return go


@pytest.fixture
def search(make, job_dir, fork_server):
    """Runs a search, and checks that no process is left."""

    def go(workers=1, /, *, look=None, **changes):
        outcome = run_search(
            make(**changes), runs=job_dir / "runs", workers=workers, on_update=look, fork_server=fork_server
        )
        assert not processes_of(outcome.paths.root)
        return outcome

    return go


@pytest.fixture
def resume(fork_server):
    def go(paths, workers=1, *, look=None):
        outcome = resume_search(paths, workers=workers, on_update=look, fork_server=fork_server)
        assert not processes_of(paths.root)
        return outcome

    return go
