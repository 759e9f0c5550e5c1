"""Histories of a run with faults at any moment: the rules hold, and when nothing more happens the run ends well."""

import pytest

from tests.simulation.history import describe_failure, fails, format_trace, make_history, run_history
from tests.simulation.kept import KEPT
from tests.simulation.mutations import (
    MUTATIONS,
    SERVER_MUTATIONS,
    SHARD_MUTATIONS,
    the_worker_that_is_ahead_leaves,
)
from tests.simulation.servers import fails_with_servers, run_server_history
from tests.simulation.shards import fails_with_shards, run_sharded_history
from tests.simulation.standins import installed

BLOCK = 50
FAST_BLOCKS = 6
LONG_BLOCK, LONG_BLOCKS = 2_000, 50
FOUND_WITHIN = 300
"""Histories within which each known mistake is found."""
FIRST_SEED = {"views_without_waiting": 70, "frozen_workers_stay": 45}
"""Where the search begins, to save time."""


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
        seeds = range(FIRST_SEED.get(name, 0), FIRST_SEED.get(name, 0) + FOUND_WITHIN)
        assert any(fails(make_history(seed)) is not None for seed in seeds)


def test_a_worker_that_leaves_with_steps_is_found():
    history = KEPT["a worker that nobody else hears is drained while it alone has steps"]
    with the_worker_that_is_ahead_leaves():
        assert "has left with steps" in str(fails(history))


# ---- parameter servers ----


def run_server_block(first, count):
    for seed in range(first, first + count):
        if failure := fails_with_servers(seed):
            pytest.fail(f"servers, seed {seed}: {failure}", pytrace=False)


@pytest.mark.parametrize("block", range(FAST_BLOCKS))
def test_no_acknowledged_update_is_lost_while_a_server_holds_it(block):
    run_server_block(block * BLOCK, BLOCK)


@pytest.mark.long
@pytest.mark.parametrize("block", range(10))
def test_the_same_over_twenty_thousand_histories_of_servers(block):
    run_server_block(block * LONG_BLOCK, LONG_BLOCK)


def test_a_seed_of_servers_is_one_history():
    first, second = run_server_history(11), run_server_history(11)
    assert first.world.trace == second.world.trace


@pytest.mark.parametrize("name", SERVER_MUTATIONS)
def test_a_mistake_in_the_placement_of_chunks_is_found(name):
    with SERVER_MUTATIONS[name]():
        assert any(fails_with_servers(seed) is not None for seed in range(FOUND_WITHIN))


# ---- sharded membership ----

KEPT_SHARDS = {
    "a worker outside the view leaves with the only copy of a shard": 854,
    "a worker leaves with the only copy after the others went back to a checkpoint": 199,
    "a member that changed its column is left out for one with another shard": 2662,
    "a member of the next view has just died": 8897,
    "the last holder of a shard died, and the others of that step leave": 13744,
}
"""Seeds of sharded histories that failed once."""


def run_sharded_block(first, count):
    for seed in range(first, first + count):
        if failure := fails_with_shards(seed):
            pytest.fail(f"shards, seed {seed}: {failure}", pytrace=False)


@pytest.mark.parametrize("block", range(2))
def test_no_shard_is_lost_while_a_holder_lives(block):
    run_sharded_block(block * 2 * BLOCK, 2 * BLOCK)


@pytest.mark.long
@pytest.mark.parametrize("block", range(10))
def test_the_same_over_twenty_thousand_histories_of_shards(block):
    run_sharded_block(block * LONG_BLOCK, LONG_BLOCK)


@pytest.mark.parametrize("name", KEPT_SHARDS)
def test_a_sharded_history_that_failed_once_no_longer_does(name):
    run_sharded_block(KEPT_SHARDS[name], 1)


def test_a_seed_of_shards_is_one_history():
    first, second = run_sharded_history(11), run_sharded_history(11)
    assert first.world.trace == second.world.trace


@pytest.mark.parametrize("name", SHARD_MUTATIONS)
def test_a_mistake_in_sharded_membership_is_found(name):
    with SHARD_MUTATIONS[name]():
        assert any(fails_with_shards(seed) is not None for seed in range(FOUND_WITHIN))


def test_a_failure_names_the_seed_and_the_faults_that_it_needs():
    with MUTATIONS["deaths_are_not_counted"]():
        seed = next(seed for seed in range(FOUND_WITHIN) if fails(make_history(seed)) is not None)
        told = describe_failure(make_history(seed))
    assert f"seed {seed}: InvariantViolation: the receipt has" in told
    assert f"python -m tests.simulation {seed} --trace" in told
    assert "faults are needed:" in told
