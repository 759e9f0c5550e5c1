"""Which way is taken, what is offered, and that every other one is told why not."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import JobError
from shoal.plan.costs import units
from shoal.plan.costs.candidates import replicated_candidates, result_changes
from shoal.plan.costs.model import CostPrediction, HostResources, LaneTime, NetworkLink, RunChoice
from shoal.plan.costs.select import LOSSY_CODEC_GAIN, WORTHWHILE_GAIN, make_plan, select_plan
from tests.plan.cost_model_cases import FAST_LINK, GB, HOST, LARGE_MODEL, SLOW_LINK, TINY_MODEL, link_of_mbit, machine

OWN = RunChoice()
ONE_CORE = HostResources(1, 16 * GB)


def made(measured=LARGE_MODEL, there=None, link=FAST_LINK, own=OWN, most=8, allow=()):
    return make_plan(own, measured, there or machine(), link, most=most, allow=allow)


def reason(found, **wanted):
    """Of the one row with this choice."""
    (row,) = [row for row in found.candidates if row.prediction.choice == RunChoice(**wanted)]
    return row.reason


CASES = [
    ("one host: a worker for each core", {}, RunChoice(workers=4)),
    ("more cores", {"there": machine(HostResources(8, 16 * GB))}, RunChoice(workers=8)),
    ("tiny model", {"measured": TINY_MODEL}, RunChoice()),
    ("one core", {"there": machine(ONE_CORE)}, RunChoice()),
    ("two hosts, fast link", {"there": machine(ONE_CORE, ONE_CORE)}, RunChoice(workers=2, hosts=2)),
    ("two hosts, slow link", {"there": machine(ONE_CORE, ONE_CORE), "link": SLOW_LINK}, RunChoice()),
    (
        "two hosts, slow link, local steps allowed",
        {"there": machine(ONE_CORE, ONE_CORE), "link": SLOW_LINK, "allow": ["local"]},
        RunChoice(workers=2, hosts=2, sync="local", every=128, settle=8),
    ),
    (
        "two hosts, slow link, a lane each, codecs allowed",
        {
            "there": machine(ONE_CORE, ONE_CORE),
            "link": link_of_mbit(50),
            "allow": ["codecs"],
            "measured": replace(LARGE_MODEL, lanes=2, times={1: LaneTime(0.1, 0.2, 0.005)}),
        },
        RunChoice(workers=2, hosts=2, codec="topk"),
    ),
    (
        "threads that pay, allowed",
        {
            "there": machine(HOST),
            "measured": replace(
                LARGE_MODEL, lanes=1, times={1: LARGE_MODEL.times[1], 4: LaneTime(0.003, 0.006, 0.002)}
            ),
            "allow": ["threads"],
        },
        RunChoice(threads=4),
    ),
    ("fewer workers than cores asked for", {"most": 2}, RunChoice(workers=2)),
    (
        "memory for one worker alone",
        {"there": machine(HostResources(4, 0.55 * GB))},
        RunChoice(),
    ),
]


@pytest.mark.parametrize(("facts", "taken"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_what_is_taken(facts, taken):
    found = made(**facts)
    assert found.pick.prediction.choice == taken, found.pick.reason
    assert found.pick.reason


def test_nothing_that_changes_the_result_is_taken_unless_it_is_allowed():
    there = machine(ONE_CORE, ONE_CORE)
    found = made(there=there, link=SLOW_LINK)
    assert found.pick.changes == ()
    assert found.offer.changes == ("local",)
    assert "needs allow [local]" in found.offer.reason
    assert WORTHWHILE_GAIN * found.offer.prediction.step_s < found.pick.prediction.step_s
    allowed = made(there=there, link=SLOW_LINK, allow=["local"])
    assert allowed.pick.prediction.choice == found.offer.prediction.choice


@pytest.mark.parametrize(
    ("choice", "own", "words"),
    [
        (RunChoice(workers=5, hosts=2), OWN, ()),
        (RunChoice(sync="server", servers=2), OWN, ()),
        (RunChoice(codec="bf16"), OWN, ("codecs",)),
        (RunChoice(), RunChoice(codec="bf16"), ("codecs",)),
        (RunChoice(codec="bf16", workers=3), RunChoice(codec="bf16"), ()),
        (RunChoice(sync="server", servers=1, staleness=4, threads=2), OWN, ("staleness", "threads")),
        (RunChoice(sync="local", every=8), OWN, ("local",)),
        (RunChoice(sync="local", every=8), RunChoice(sync="local", every=32), ("local",)),
        (RunChoice(sync="local", every=8, workers=2), RunChoice(sync="local", every=8), ()),
    ],
)
def test_what_changes_the_result(choice, own, words):
    assert result_changes(choice, own) == words


# ---- reasons ----


def test_small_work_is_left_to_one_worker_and_says_what_the_exchange_would_take():
    found = made(measured=TINY_MODEL, there=machine(ONE_CORE, ONE_CORE), link=link_of_mbit(1000, latency_s=5e-3))
    assert found.pick.reason.startswith("one worker is faster: with ")
    said = reason(found, workers=2, hosts=2)
    assert said == "one worker is faster: exchange 5.6 ms, compute 0.13 ms instead of 0.26 ms"


def test_codecs_that_cost_more_than_they_save():
    found = made(there=machine(HOST, HOST), link=link_of_mbit(40_000))
    assert reason(found, workers=8, hosts=2, codec="topk").startswith("topk costs more than it saves on this link: ")
    assert reason(found, workers=4, codec="int8").startswith("on one host nothing is sent: int8 is only work, ")


def test_servers_beside_lanes():
    said = reason(made(), workers=4, sync="server", servers=1)
    assert said.startswith("lanes are faster: servers take ")


def test_the_pick_says_what_it_gains():
    assert made().pick.reason.startswith("3.")
    assert "times as fast as one worker: compute 65 ms instead of 275 ms, exchange " in made().pick.reason


def test_little_gain_is_not_worth_more_processes():
    fast = [CostPrediction(RunChoice(workers=n), compute_s=s) for n, s in ((1, 0.104), (2, 0.100))]
    found = select_plan(fast, own=OWN)
    assert found.pick.prediction.choice.workers == 1
    assert found.pick.reason == "2 workers would be only 4 % faster"
    assert [row.reason for row in found.candidates if row is not found.pick] == ["4 % faster: not worth more processes"]


def test_rounds_are_short_where_that_costs_hardly_anything():
    """Fewer steps to a round change the result less, but are not worth what another result is."""
    told = {8: 0.1035, 32: 0.1015, 128: 0.1}
    kinds = {n: RunChoice(workers=2, sync="local", every=n, settle=128 // n) for n in told}
    rows = [CostPrediction(kinds[n], compute_s=s) for n, s in told.items()] + [
        CostPrediction(RunChoice(), compute_s=0.2)
    ]
    assert select_plan(rows, own=OWN, allow=["local"]).pick.prediction.choice == kinds[32]
    assert select_plan(rows, own=OWN).pick.prediction.choice == RunChoice()
    assert select_plan(rows, own=kinds[128], allow=["local"]).pick.prediction.choice == kinds[128], "the job's own"


@pytest.mark.parametrize(("topk_s", "taken"), [(0.08, "bf16"), (0.07, "topk")])
def test_a_codec_that_learns_slower_must_be_much_faster(topk_s, taken):
    told = {"none": 0.2, "bf16": 0.1, "int8": 0.098, "topk": topk_s}
    rows = [CostPrediction(RunChoice(workers=2, hosts=2, codec=codec), compute_s=s) for codec, s in told.items()]
    assert select_plan(rows, own=OWN, allow=["codecs"]).pick.prediction.choice.codec == taken
    assert select_plan(rows, own=RunChoice(codec="topk"), allow=["codecs"]).pick.prediction.choice.codec == "topk", (
        "its own"
    )


def test_a_run_agrees_on_everything_twice_at_least():
    kinds = replicated_candidates(OWN, replace(LARGE_MODEL, steps=300), machine(HOST), most=2)
    assert {(it.every, it.settle) for it in kinds if it.sync == "local"} == {(8, 8), (32, 4), (128, 1)}
    kinds = replicated_candidates(OWN, replace(LARGE_MODEL, steps=10), machine(HOST), most=2)
    assert not [it for it in kinds if it.sync == "local"]


def test_nothing_fits():
    found = made(there=machine(HostResources(4, 0.1 * GB)))
    assert found.pick is None
    assert found.offer is None
    assert {row.reason.split(",")[1] for row in found.candidates} == {" the machine has 0.1 GB"}


BIG = replace(
    LARGE_MODEL,
    shapes=((1000, 1000),) * 500,
    stretch_bytes=2 * GB,
    optimizer_bytes=4 * GB,
    worker_bytes=9 * GB,
    lanes=4,
)
"""11.3 GB for one worker, of which 1 GB is a lane's own, and 2 a third sum of its four lanes."""


def test_what_does_not_fit_is_offered_in_shards():
    """Of a pipeline every worker has a part of what a lane needs, too."""
    found = made(measured=BIG, there=machine(HostResources(2, 10 * GB)), most=4)
    assert found.pick is None
    assert reason(found) == "needs 11.3 GB, the machine has 10.0 GB"
    assert reason(found, workers=4, shard="pipeline") == "fits: 9.3 GB on the fullest machine"
    assert reason(found, workers=4, shard="fsdp") == "needs 12.3 GB, the machine has 10.0 GB"
    assert reason(found, workers=2, shard="tensor") == "needs 10.3 GB, the machine has 10.0 GB"
    assert found.offer.prediction.choice.shard == "pipeline"
    assert found.offer.changes == ("shard",)


def test_shards_are_looked_at_and_not_offered_where_something_else_can_be():
    found = made(there=machine(HOST, HOST), most=4)
    shards = [row for row in found.candidates if row.prediction.choice.shard != "none"]
    kinds = {
        (row.prediction.choice.shard, row.prediction.choice.workers, row.prediction.choice.hosts) for row in shards
    }
    assert kinds == {(kind, n, 1) for kind in ("fsdp", "tensor", "pipeline") for n in (2, 3, 4)}
    assert all(row.prediction.step_s > 0 and row.changes == ("shard",) and row.reason for row in shards)
    assert found.pick.prediction.choice.shard == "none"
    assert found.offer is None or "shard" not in found.offer.changes


@pytest.mark.parametrize(("own", "numbers"), [(1, {2, 3, 4}), (2, {2})])
def test_a_job_with_a_shard_keeps_it(own, numbers):
    """Over the number of workers that the job says, or else over any."""
    found = made(own=RunChoice(workers=own, shard="tensor"), measured=replace(LARGE_MODEL, lanes=1), most=4)
    assert found.pick.prediction.choice.shard == "tensor"
    assert {row.prediction.choice.workers for row in found.candidates if row.allowed} == numbers
    assert all("shard" in row.changes for row in found.candidates if row.prediction.choice.shard != "tensor")


def test_a_gpu_has_one_worker():
    found = made(measured=replace(LARGE_MODEL, gpus=2), there=machine(HOST, HOST), most=8)
    assert reason(found, workers=3) == "3 workers on a machine with 2 GPUs"
    assert found.pick.prediction.choice == RunChoice(workers=4, hosts=2)


def test_one_worker_with_sparse_tables_has_servers():
    found = made(measured=replace(LARGE_MODEL, only_servers="tables"), most=1)
    assert found.pick.prediction.choice == RunChoice(sync="server", servers=1)


links = st.builds(NetworkLink, st.floats(0, 0.1), st.floats(1e5, 1e10), st.floats(1e5, 1e10))
allowances = st.sets(st.sampled_from(["codecs", "local", "staleness", "threads"]))
THREADED = replace(LARGE_MODEL, times={1: LARGE_MODEL.times[1], 2: LaneTime(0.006, 0.012, 0.003)})


@given(
    st.sampled_from([LARGE_MODEL, TINY_MODEL, THREADED]),
    st.lists(st.sampled_from([HOST, ONE_CORE, HostResources(2, 0.6 * GB, speed=0.3)]), min_size=1, max_size=3),
    links,
    allowances,
)
@pytest.mark.long
def test_every_no_has_its_sentence_and_the_pick_is_about_the_fastest(measured, hosts, link, allow):
    found = made(measured=measured, there=machine(*hosts), link=link, allow=allow)
    assert all(row.reason for row in found.candidates)
    possible = [row for row in found.candidates if row.feasible]
    steps = [row.prediction.step_s for row in possible]
    assert steps == sorted(steps)
    assert found.pick in found.candidates
    assert set(found.pick.changes) <= allow
    allowed = {row.prediction.choice: row.prediction.step_s for row in possible if row.allowed}
    fastest, taken = min(allowed.values()), found.pick.prediction.step_s
    assert taken <= LOSSY_CODEC_GAIN * WORTHWHILE_GAIN * fastest
    assert taken <= WORTHWHILE_GAIN * min(
        s for choice, s in allowed.items() if choice.codec not in ("topk", "lowrank", "sign")
    )
    assert found.offer is None or not set(found.offer.changes) <= allow


def test_candidates_hold_what_the_job_says_and_nothing_twice():
    own = RunChoice(sync="server", servers=3, staleness=float("inf"), codec="bf16")
    looked_at = replicated_candidates(own, LARGE_MODEL, machine(HOST, HOST), most=8)
    assert len(set(looked_at)) == len(looked_at)
    assert all(replace(own, workers=n) in looked_at for n in range(1, 9))
    assert all(choice.hosts <= choice.workers for choice in looked_at)
    many = {choice.workers for choice in replicated_candidates(OWN, LARGE_MODEL, machine(), most=100)}
    assert {1, 2, 3, 8, 12, 64, 96, 100} <= many
    assert len(many) < 20


# ---- amounts ----


@pytest.mark.parametrize(
    ("text", "value"), [("100mbit", 12.5e6), ("1 Gbit", 125e6), ("1.5GB/s", 1.5e9), (" 200 kB/s ", 2e5)]
)
def test_speeds(text, value):
    assert units.parse_bytes_per_s(text, where="--link") == pytest.approx(value)


@pytest.mark.parametrize(("text", "value"), [("1ms", 1e-3), ("200us", 2e-4), ("0.5 s", 0.5), ("0ms", 0)])
def test_durations(text, value):
    assert units.parse_seconds(text, where="--latency") == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "fast", "100", "0mbit", "-1mbit", "10 parsec"])
def test_what_is_no_speed(text):
    with pytest.raises(JobError, match="SH106 --link"):
        units.parse_bytes_per_s(text, where="--link")


@pytest.mark.parametrize(("text", "value"), [("1,0.25", (1.0, 0.25)), (" 1 , 2 ", (1.0, 2.0)), ("0.5", (0.5,))])
def test_speeds_of_hosts(text, value):
    assert units.parse_speeds(text, where="--speeds") == value


def test_speeds_are_of_each_host():
    assert units.parse_speeds("1,0.5", where="--speeds", hosts=2) == (1, 0.5)
    with pytest.raises(JobError, match="SH106 --speeds: 3 hosts, but 2 speeds"):
        units.parse_speeds("1,0.5", where="--speeds", hosts=3)


@pytest.mark.parametrize("text", ["", "1,", "1,0", "fast", "1;2", "-1"])
def test_what_are_no_speeds(text):
    with pytest.raises(JobError, match="SH106 --speeds"):
        units.parse_speeds(text, where="--speeds")
