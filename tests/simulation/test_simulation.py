"""Histories of a run with faults at any moment: the rules hold, and when nothing more happens the run ends well."""

import pytest

from tests.simulation.history import describe_failure, fails, format_trace, make_history, run_history
from tests.simulation.kept import KEPT
from tests.simulation.mutations import MUTATIONS
from tests.simulation.standins import installed

BLOCK = 50
FAST_BLOCKS = 8
LONG_BLOCK, LONG_BLOCKS = 2_000, 50
FOUND_WITHIN = 400
"""Histories within which each known mistake is found."""


@pytest.fixture(autouse=True)
def simulated():
    with installed():
        yield


def run_block(first, count):
    for seed in range(first, first + count):
        history = make_history(seed)
        if fails(history) is not None:
            pytest.fail(describe_failure(history), pytrace=False)


@pytest.mark.parametrize("block", range(FAST_BLOCKS))
def test_whatever_happens_the_rules_hold_and_the_run_ends_with_the_right_weights(block):
    run_block(block * BLOCK, BLOCK)


@pytest.mark.long
@pytest.mark.parametrize("block", range(LONG_BLOCKS))
def test_the_same_over_a_hundred_thousand_histories(block):
    run_block(block * LONG_BLOCK, LONG_BLOCK)


@pytest.mark.parametrize("name", KEPT)
def test_a_history_that_failed_once_no_longer_does(name):
    history = KEPT[name]
    if fails(history) is not None:
        pytest.fail(describe_failure(history), pytrace=False)


@pytest.mark.parametrize("seed", [3, 5, 14, 26, 49, 198])
def test_a_seed_is_one_history(seed):
    first, second = run_history(make_history(seed)), run_history(make_history(seed))
    assert format_trace(first) == format_trace(second)
    assert len(first.world.trace) > 20


def test_different_seeds_are_different_histories():
    assert len({"\n".join(format_trace(run_history(make_history(seed)))) for seed in range(10)}) == 10


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_in_the_real_code_is_found(name):
    with MUTATIONS[name]():
        found = next((seed for seed in range(FOUND_WITHIN) if fails(make_history(seed)) is not None), None)
    assert found is not None, f"{FOUND_WITHIN} histories did not show that {name.replace('_', ' ')}"


def test_a_failure_names_the_seed_and_the_faults_that_it_needs():
    with MUTATIONS["deaths_are_not_counted"]():
        seed = next(seed for seed in range(FOUND_WITHIN) if fails(make_history(seed)) is not None)
        told = describe_failure(make_history(seed))
    assert f"seed {seed}: InvariantViolation: the receipt has" in told
    assert f"python -m tests.simulation {seed} --trace" in told
    assert "faults are needed:" in told
