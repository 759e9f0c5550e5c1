"""The frozen and the hanging are found soon, and nobody else is suspected."""

from __future__ import annotations

import dataclasses
import random

import pytest

from shoal.plan.suspicion import Sign, Suspicion

from .crew_in_time import Crew, training

AT_WORK = Sign(0, 0.1, False, "compute", units=50, since_s=0.1, step=7, units_in_phase=20)


def sign(seat=0, **changes):
    return dataclasses.replace(AT_WORK, seat=seat, **changes)


def waits(seat=1, **changes):
    return sign(seat, **{"phase": "exchange", **changes})


def started():
    """One whose clocks have been running for long, until the time 100."""
    suspicion = Suspicion()
    for tick in range(1000):
        suspicion.look(tick / 2 - 400, [])
    return suspicion


def whys(suspicion, now_s, *signs):
    return {verdict.seat: verdict.why for verdict in suspicion.look(now_s, signs)}


# ---- whole crews ----


def crew(rng, **options):
    lane_s = rng.uniform(0.01, 0.5)
    plans = [
        training(lane_s * rng.uniform(0.5, 1), lanes=rng.randint(1, 4), **options) for _ in range(rng.randint(2, 6))
    ]
    return Crew(plans, rng)


@pytest.mark.parametrize("seed", range(25))
def test_a_hanging_worker_is_found_within_five_seconds(seed):
    rng = random.Random(seed)
    crew_ = crew(rng, evaluation=(0.3, 3.0))
    victim = rng.choice(crew_.workers)
    assert crew_.run(rng.uniform(15, 40)) == []
    assert crew_.run(60, until=lambda: victim.settled) == []
    victim.hangs = True
    hung_at_s, phase = crew_.now_s, victim.phase
    verdicts = crew_.run(5)
    assert [verdict.seat for verdict in verdicts] == [victim.seat]
    assert crew_.now_s - hung_at_s < 5
    assert f"hangs in {phase} at step {victim.step}" in verdicts[0].why
    assert "model.py:12 in f" in verdicts[0].why


@pytest.mark.parametrize("seed", range(25))
def test_a_frozen_worker_is_found_within_five_seconds(seed):
    rng = random.Random(seed)
    crew_ = crew(rng, evaluation=(0.3, 3.0))
    victim = rng.choice(crew_.workers)
    assert crew_.run(rng.uniform(5, 40)) == []
    victim.frozen = True
    frozen_at_s = crew_.now_s
    verdicts = crew_.run(5)
    assert [verdict.seat for verdict in verdicts] == [victim.seat]
    assert "frozen" in verdicts[0].why
    assert crew_.now_s - frozen_at_s < (1.5 if victim.local else 3)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "calm",
    [
        pytest.param(lambda rng: crew(rng, first_batch_s=20.0), id="a first batch of 20 s"),
        pytest.param(lambda rng: crew(rng, evaluation=(1.0, 60.0)), id="an evaluation of 60 s in chunks of 1 s"),
        pytest.param(lambda rng: Crew([training(0.05), training(0.05), training(0.5)], rng), id="ten times slower"),
        pytest.param(
            lambda rng: Crew([training(0.5), training(0.5), training(5.0)], rng), id="ten times as slow as slow"
        ),
        pytest.param(lambda rng: Crew([training(20.0), training(25.0)], rng), id="lanes of 20 s"),
        pytest.param(lambda rng: Crew([training(20.0)], rng), id="alone"),
    ],
)
def test_what_is_only_slow_is_left_alone(calm, seed):
    assert calm(random.Random(seed)).run(200) == []


@pytest.mark.parametrize("seed", range(10))
def test_pauses_of_two_seconds_are_left_alone(seed):
    rng = random.Random(seed)
    crew_ = crew(rng)
    for _ in range(15):
        assert crew_.run(rng.uniform(3, 8)) == []
        rng.choice(crew_.workers).paused_s = 2.0


# ---- frozen ----


def test_silence_is_a_verdict():
    suspicion = started()
    assert whys(suspicion, 100, sign(0, heard_s=2.4), waits()) == {}
    assert whys(suspicion, 100.1, sign(0, heard_s=2.6), waits()) == {0: "frozen: not heard for 2.6 s"}


def test_one_who_waits_can_be_frozen_too():
    assert 1 in whys(started(), 100, sign(0), waits(1, heard_s=2.6))


def test_a_stopped_process_is_found_sooner():
    suspicion = started()
    assert whys(suspicion, 100, sign(heard_s=1.2, stopped=True), waits()) == {}
    assert whys(suspicion, 100.6, sign(heard_s=1.8, stopped=True), waits()) == {
        0: "frozen: stopped, and not heard for 1.8 s"
    }


def test_a_process_that_was_stopped_for_a_moment_goes_on():
    suspicion = started()
    assert whys(suspicion, 100, sign(heard_s=1.2, stopped=True), waits()) == {}
    assert whys(suspicion, 100.4, sign(), waits()) == {}
    assert whys(suspicion, 100.8, sign(heard_s=1.2, stopped=True), waits()) == {}


def test_imports_may_be_silent_for_longer():
    suspicion = started()
    assert whys(suspicion, 100, sign(phase="building", heard_s=29), waits()) == {}
    assert whys(suspicion, 100.1, sign(phase="building", heard_s=31), waits()) != {}


def test_clocks_start_anew_when_the_one_who_looks_was_held_up():
    suspicion = started()
    silent = [sign(seat, heard_s=20.0, since_s=20.0, stopped=True) for seat in range(3)]
    assert suspicion.look(120, silent) == []
    assert suspicion.look(121, silent) == []
    heard = [sign(0, since_s=22.0), waits(1), sign(2, heard_s=22.6)]
    assert suspicion.look(122, heard) == []
    assert whys(suspicion, 122.6, *heard) == {2: "frozen: not heard for 2.6 s"}


def test_each_is_convicted_once():
    suspicion = started()
    silent = [sign(heard_s=3.0), waits()]
    assert len(suspicion.look(100, silent)) == 1
    assert suspicion.look(100.1, silent) == []


# ---- hanging ----


def test_the_limit_is_three_seconds_or_eight_times_the_slowest():
    suspicion = started()
    assert whys(suspicion, 100, sign(since_s=2.9), waits()) == {}
    assert whys(suspicion, 100.2, sign(since_s=3.1, line="model.py:12 in forward"), waits()) == {
        0: "hangs in compute at step 7 for 3.1 s: model.py:12 in forward"
    }
    suspicion = started()
    for unit in range(3):
        suspicion.look(100 + unit, [sign(units=50 + unit, since_s=1.0), waits()])
    assert whys(suspicion, 103, sign(units=52, since_s=7.9), waits()) == {}
    assert whys(suspicion, 103.5, sign(units=52, since_s=8.1), waits()) != {}


def test_another_workers_pace_counts_and_another_phase_does_not():
    suspicion = started()
    for unit in range(3):
        suspicion.look(100 + unit, [sign(0, units=50 + unit, since_s=1.0), sign(1)])
    slow = {"since_s": 5.0}
    assert whys(suspicion, 103, sign(0, units=53), sign(1, **slow)) == {}
    assert whys(suspicion, 103.1, sign(0, units=53), sign(1, phase="data", **slow)) != {}


@pytest.mark.parametrize("changes", [{"units_in_phase": 0}, *({"phase": p} for p in ("saving", "telling", "export"))])
def test_what_has_no_usual_time_gets_five_minutes(changes):
    suspicion = started()
    assert whys(suspicion, 100, sign(since_s=299.0, **changes), waits()) == {}
    assert whys(suspicion, 100.1, sign(since_s=301.0, **changes), waits()) != {}


def test_a_long_first_unit_counts_only_until_the_second_is_done():
    suspicion = started()
    suspicion.look(100, [sign(units=1, units_in_phase=0, since_s=20.0), waits()])
    assert whys(suspicion, 100.1, sign(units=2, units_in_phase=1, since_s=30.0), waits()) == {}
    suspicion.look(100.2, [sign(units=2, units_in_phase=1, since_s=0.1), waits()])
    assert whys(suspicion, 100.3, sign(units=3, units_in_phase=2, since_s=3.1), waits()) != {}


def test_a_later_process_has_as_long_for_its_first_unit_as_those_before_it_showed():
    first = {"units_in_phase": 0}
    assert whys(started(), 100, sign(units=1, since_s=299.0, **first), waits()) == {}
    suspicion = started()
    suspicion.look(100, [sign(units=1, since_s=5.0, **first), waits()])
    suspicion.look(100.1, [sign(units=2, units_in_phase=1), waits()])
    assert whys(suspicion, 100.2, sign(units=3), waits(), sign(2, units=1, since_s=39.0, **first)) == {}
    assert list(whys(suspicion, 100.3, sign(units=4), waits(), sign(2, units=1, since_s=40.1, **first))) == [2]


def test_the_pace_of_one_who_left_is_forgotten():
    suspicion = started()
    for unit in range(3):
        suspicion.look(100 + unit, [sign(0, units=50 + unit, since_s=10.0, units_in_phase=0), waits()])
    now_s = 103.0
    while now_s < 170:
        suspicion.look(now_s, [waits(1), waits(2, phase="data", units_in_phase=0)])
        now_s += 0.5
    assert whys(suspicion, now_s, sign(1, since_s=3.1), waits(2)) != {}


def test_one_alone_has_more_time():
    suspicion = started()
    assert whys(suspicion, 100, sign(since_s=29.0)) == {}
    assert whys(suspicion, 100.1, sign(since_s=31.0)) != {}
    assert whys(started(), 100, sign(heard_s=2.6)) != {}


def test_a_step_that_hangs_again_gets_twice_the_time_until_it_is_forgiven():
    suspicion = started()
    assert whys(suspicion, 100, sign(0, since_s=3.1), waits()) != {}
    for tick in range(200, 240):
        suspicion.look(tick / 2, [waits(1), waits(3, phase="waiting")])
    assert whys(suspicion, 120, sign(1, since_s=5.9), waits(2)) == {}
    assert whys(suspicion, 120.2, sign(1, since_s=6.1), waits(2)) != {}
    assert whys(suspicion, 120.3, sign(2, since_s=3.1, step=8), waits(3)) != {}
    suspicion.forgive(7)
    assert whys(suspicion, 120.4, sign(4, since_s=3.1), waits(3)) != {}


def test_two_that_hang_at_once_are_both_found_in_time():
    suspicion = started()
    assert set(whys(suspicion, 100, sign(0, since_s=3.1), sign(1, since_s=2.9))) == {0}
    assert set(whys(suspicion, 100.3, sign(0, since_s=3.4), sign(1, since_s=3.2))) == {1}
    for tick in range(201, 220):
        suspicion.look(tick / 2, [waits(2), waits(3)])
    assert set(whys(suspicion, 110, sign(2, since_s=6.1), waits(3))) == {2}  # they count as one: twice the time, not 4


# ---- stuck ----


def look_until(suspicion, begin_s, end_s, signs):
    """The time at which all were first stuck; None if that did not happen."""
    now_s = begin_s
    while now_s < end_s:
        verdicts = suspicion.look(now_s, signs(now_s - begin_s))
        assert verdicts == []
        if suspicion.stuck:
            return now_s - begin_s
        now_s += 0.1
    return None


def test_all_waiting_for_each_other_are_stuck_and_none_is_to_blame():
    suspicion = started()
    assert look_until(suspicion, 100, 110, lambda t: [waits(0, since_s=t), waits(1, since_s=t)]) == pytest.approx(
        4, abs=0.2
    )


@pytest.mark.parametrize(
    "other",
    [
        lambda t: sign(1, since_s=0.1),
        lambda t: sign(1, phase="saving", since_s=t),
        lambda t: waits(1, since_s=0.5),
    ],
)
def test_nobody_is_stuck_while_one_works_or_has_just_come(other):
    assert look_until(started(), 100, 120, lambda t: [waits(0, since_s=t), other(t)]) is None


def test_one_who_may_be_frozen_is_waited_for_first():
    suspicion = started()
    assert suspicion.look(100, [waits(0, since_s=9.0), waits(1, since_s=9.0, heard_s=1.5)]) == []
    assert not suspicion.stuck


def test_nobody_is_stuck_while_something_gets_through():
    """However slow the link is; when nothing moves any more, it takes as long as ever."""

    def signs(t, until):
        return [waits(0, since_s=t), waits(1, since_s=t, moved_bytes=int(1000 * min(t, until)))]

    assert look_until(started(), 100, 160, lambda t: signs(t, until=100)) is None
    assert look_until(started(), 100, 160, lambda t: signs(t, until=30)) == pytest.approx(34, abs=0.2)


def test_waiting_for_the_driver_is_not_stuck():
    both = [waits(seat, phase="waiting", since_s=50.0) for seat in (0, 1)]
    assert look_until(started(), 100, 120, lambda t: both) is None
    assert look_until(started(), 100, 120, lambda t: [waits(0, since_s=t)]) is None


def test_it_is_told_once_and_then_gets_twice_the_time():
    suspicion = started()
    signs = lambda t: [waits(0, since_s=t), waits(1, since_s=t)]  # noqa: E731
    assert look_until(suspicion, 100, 120, signs) == pytest.approx(4, abs=0.2)
    assert look_until(suspicion, 104.2, 107.9, lambda t: signs(t + 4.2)) is None
    assert look_until(suspicion, 108.0, 140, signs) == pytest.approx(8, abs=0.2)


def test_a_slow_link_is_learned():
    suspicion = started()
    at = lambda step: lambda t: [waits(0, since_s=t, step=step), waits(1, since_s=t, step=step)]  # noqa: E731
    assert look_until(suspicion, 100, 103.5, at(7)) is None
    assert look_until(suspicion, 103.5, 120, at(8)) is None  # eight times the 3.4 s that the last one took
    assert look_until(suspicion, 120, 170, at(9)) is None
