"""What is pushed to servers may be encoded; the bits are those of the same codec with lanes."""

import pytest

from tests.jobs.fault_injection import JOBS, assert_same, reference_receipt, time_limit
from tests.jobs.test_parameter_servers import GENTLE, ServerKiller, server_sync

CODECS = {
    "bf16": {"kind": "bf16"},
    "int8": {"kind": "int8"},
    "sign": {"kind": "sign"},
    "topk": {"kind": "topk", "keep": 0.1},
    "lowrank": {"kind": "lowrank", "rank": 2},
}


@pytest.fixture(autouse=True)
def limited_time():
    with time_limit(120):
        yield


@pytest.mark.parametrize("codec", CODECS)
def test_the_bits_of_lanes_with_the_same_codec(codec, run):
    job = JOBS["cnn"] | {"codec": CODECS[codec]}
    assert_same(run(job, workers=2, sync=server_sync(2)), reference_receipt(run, job))


def test_servers_die_and_nothing_is_lost(run):
    job = JOBS["mlp"] | {"codec": CODECS["topk"], "steps": 100}
    assert_same(run(job, workers=2, sync=server_sync(3), look=ServerKiller(20, 60)), reference_receipt(run, job))


@pytest.mark.parametrize("codec", ["int8", "topk"])
def test_lanes_that_go_their_own_way(codec, run):
    job = GENTLE | {"codec": CODECS[codec], "steps": 100, "sync": server_sync(2, 1, 4)}
    outcome = run(job, workers=3)
    assert outcome.status == "finished", outcome.error
    assert outcome.receipt.metrics["accuracy"] > 0.7
