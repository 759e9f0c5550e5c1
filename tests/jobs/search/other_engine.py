"""A search whose trials run on another engine, and the same search here."""

import copy

from shoal.jobs.search.driver import run_search
from shoal.jobs.search.summary import compare_searches, read_search
from shoal.spec.load import make_job
from tests.jobs.search.conftest import SMALL

PROMOTE = {"policy": {"kind": "promote", "sampler": "random", "first": 1}, "budget": "2 trials", "slots": 2}


def assert_same_search(engine, job_dir, fork_server, **changes):
    """Two trials, of which one at least is paused and goes on."""
    data = copy.deepcopy(SMALL) | {"search": SMALL["search"] | PROMOTE}
    jobs = {"here": data, "there": data | {"engine": engine} | changes}
    here, there = (
        run_search(make_job(job, base_dir=str(job_dir)), runs=job_dir / name, workers=2, fork_server=fork_server)
        for name, job in jobs.items()
    )
    assert compare_searches(read_search(here.paths), read_search(there.paths)).difference == ""
    assert there.receipt.search_sha256 == here.receipt.search_sha256
    assert there.receipt.exact is True, there.receipt.why
    assert there.receipt.decisions > there.receipt.trials
