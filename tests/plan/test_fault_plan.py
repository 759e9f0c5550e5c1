"""Plans of faults: readable, repeatable, in order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ShoalError
from shoal.plan.fault_plan import Fault, parse_fault, parse_faults, random_fault_plan, read_fault_plan, sort_faults

KINDS = ("kill", "freeze", "slow", "join", "kill server")
FAULTS = st.builds(
    lambda kind, step, place: Fault(kind, step, 0 if kind == "join" else place),
    st.sampled_from(KINDS),
    st.integers(0, 10**9),
    st.integers(0, 9999),
)


@given(FAULTS)
def test_a_fault_is_read_as_it_is_written(fault):
    assert parse_fault(str(fault)) == fault


@given(st.lists(FAULTS))
def test_a_plan_is_read_as_it_is_written(faults):
    assert parse_faults("\n".join(map(str, faults))) == sort_faults(faults)


def test_lines_read_like_sentences():
    assert str(Fault("kill", 7, 2)) == "kill worker 2 at step 7"
    assert str(Fault("join", 9)) == "join at step 9"
    assert str(Fault("kill server", 8, 1)) == "kill server 1 at step 8"
    text = "# a bad day\n\n  freeze  worker 0 at step 30  # Monday\njoin at step 4\n"
    assert parse_faults(text) == [Fault("join", 4), Fault("freeze", 30, 0)]


@pytest.mark.parametrize(
    "line", ["kill", "kill worker 2", "join worker 1 at step 3", "hug worker 1 at step 3", "slow server 1 at step 3"]
)
def test_what_is_no_fault_is_told(line):
    with pytest.raises(ShoalError, match="SH617"):
        parse_fault(line)


def test_a_plan_that_cannot_be_read(tmp_path):
    with pytest.raises(ShoalError, match="SH617"):
        read_fault_plan(tmp_path / "nowhere.txt")


NUMBERS = st.fixed_dictionaries({kind: st.integers(0, 20) for kind in KINDS})


@given(NUMBERS, st.integers(1, 10**6), st.integers(1, 50), st.integers(0, 2**32))
def test_a_seeded_plan_has_what_was_asked_for(numbers, steps, workers, seed):
    made = random_fault_plan(numbers, steps=steps, workers=workers, seed=seed)
    assert made == random_fault_plan(numbers, steps=steps, workers=workers, seed=seed)
    assert {kind: sum(f.kind == kind for f in made) for kind in KINDS} == numbers
    assert made == sort_faults(made)
    assert all(1 <= f.step <= max(steps, 1) and 0 <= f.target_index < workers for f in made)


def test_another_seed_is_another_plan():
    plans = {tuple(random_fault_plan({"kill": 10}, steps=1000, workers=4, seed=seed)) for seed in range(20)}
    assert len(plans) == 20


@given(st.sets(st.integers(0, 100), min_size=1), st.integers(0, 9999))
def test_somebody_who_is_there_is_chosen(seats, place):
    assert Fault("kill", 1, place).target_seat(list(seats)) in seats


def test_the_place_counts_those_who_are_there():
    assert [Fault("kill", 1, place).target_seat([9, 4, 7]) for place in range(4)] == [4, 7, 9, 4]


def test_asking_for_more_kinds_does_not_change_what_was_planned_before():
    before = random_fault_plan({"kill": 5, "join": 2}, steps=1000, workers=4, seed=1)
    after = random_fault_plan({"kill": 5, "join": 2, "kill server": 3}, steps=1000, workers=4, seed=1)
    assert [fault for fault in after if fault.kind != "kill server"] == before
