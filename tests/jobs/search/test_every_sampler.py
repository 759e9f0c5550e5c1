"""Real searches through the command line with each sampler that learns."""

import json

import pytest

from shoal.jobs.search.replay import check_again
from shoal.jobs.search.search_dir import find
from shoal.jobs.search.summary import compare_searches, read_search
from shoal.plan.search.make import make_search
from tests.jobs.search.test_search import job_file, start_process  # noqa: F401

SAMPLERS = {
    "tpe": "tpe",
    "gp": "gp",
    "cmaes": "cmaes",
    "nsga2": "nsga2",
    "optuna": {"name": "optuna:TPESampler", "args": {"n_startup_trials": 4}},
}
SPACE = {
    "optimizer.args.lr": {"low": 1e-4, "high": 1e-1, "log": True},
    "optimizer.args.weight_decay": {"low": 1e-6, "high": 1e-1, "log": True},
}
TRIALS = {"nsga2": 26}
"""Else 18. The generations of nsga2 begin with 20; the others learn from 10 trials or fewer."""


def asked(sampler, trials):
    policy = {"kind": "promote", "sampler": sampler, "first": 1}
    return {"space": SPACE, "policy": policy, "budget": f"{trials} trials", "slots": 3}


@pytest.mark.long
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_search_is_the_same_for_one_and_two_workers_and_after_a_kill(sampler, make, job_file, job_dir):  # noqa: F811
    if sampler == "optuna":
        pytest.importorskip("optuna")
    trials, receipts = TRIALS.get(sampler, 18), []
    file = job_file(search=asked(SAMPLERS[sampler], trials))
    for name, workers in (("one", 1), ("two", 2), ("killed", 2)):
        process = start_process(file, job_dir / name, str(file), workers=workers)
        results = 0
        for line in process.stdout:
            results += json.loads(line).get("kind") == "told"
            if name == "killed" and results == trials:
                process.kill()
        if name == "killed":
            assert process.wait() == -9
            process = start_process(file, job_dir / name, "resume", "last")
            line = process.stdout.read().splitlines()[-1]
        assert process.wait() == 0
        receipts.append(json.loads(line))
    one, *others = (read_search(find("last", job_dir / name)) for name in ("one", "two", "killed"))
    assert [compare_searches(one, other).difference for other in others] == ["", ""]
    assert len({receipt["search_sha256"] for receipt in receipts}) == 1
    assert all(receipt["exact"] is True for receipt in receipts), [receipt["why"] for receipt in receipts]
    assert [receipt["starts"] for receipt in receipts] == [1, 1, 2]
    assert (receipts[0]["trials"], receipts[0]["failed"]) == (trials, 0)
    at_random = make_search(make(search=asked("random", trials)))
    assert any(check_again(at_random, one.rows)), "the sampler proposed what the random one would"
