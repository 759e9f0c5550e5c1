"""The frozen and the hanging are found soon, and nobody else is suspected."""

from __future__ import annotations

import dataclasses
import random

import pytest

from shoal.plan.failure_detector import FailureDetector, Heartbeat

from .simulated_heartbeats import HeartbeatSimulation, training_schedule

AT_WORK = Heartbeat(0, 0.1, False, "compute", units=50, since_s=0.1, step=7, units_in_phase=20)


def heartbeat(seat=0, **changes):
    return dataclasses.replace(AT_WORK, seat=seat, **changes)


def waiting_heartbeat(seat=1, **changes):
    return heartbeat(seat, **{"phase": "exchange", **changes})


def started():
    """One whose clocks have been running for long, until the time 100."""
    suspicion = FailureDetector()
    for tick in range(1000):
        suspicion.check(tick / 2 - 400, [])
    return suspicion


def failure_reasons(suspicion, now_s, *signs):
    return {verdict.seat: verdict.why for verdict in suspicion.check(now_s, signs)}


# ---- whole crews ----


def random_simulation(rng, **options):
    lane_s = rng.uniform(0.01, 0.5)
    plans = [
        training_schedule(lane_s * rng.uniform(0.5, 1), lanes=rng.randint(1, 4), **options)
        for _ in range(rng.randint(2, 6))
    ]
    return HeartbeatSimulation(plans, rng)


@pytest.mark.parametrize("seed", range(25))
def test_a_hanging_worker_is_found_within_five_seconds(seed):
    rng = random.Random(seed)
    crew_ = random_simulation(rng, evaluation=(0.3, 3.0))
    victim = rng.choice(crew_.workers)
    assert crew_.run(rng.uniform(15, 40)) == []
    assert crew_.run(60, until=lambda: victim.is_calibrated) == []
    victim.hung = True
    hung_at_s, phase = crew_.now_s, victim.phase
    verdicts = crew_.run(5)
    assert [verdict.seat for verdict in verdicts] == [victim.seat]
    assert crew_.now_s - hung_at_s < 5
    assert f"hangs in {phase} at step {victim.step}" in verdicts[0].why
    assert "model.py:12 in f" in verdicts[0].why


@pytest.mark.parametrize("seed", range(25))
def test_a_frozen_worker_is_found_within_five_seconds(seed):
    rng = random.Random(seed)
    crew_ = random_simulation(rng, evaluation=(0.3, 3.0))
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
        pytest.param(lambda rng: random_simulation(rng, first_batch_s=20.0), id="a first batch of 20 s"),
        pytest.param(
            lambda rng: random_simulation(rng, evaluation=(1.0, 60.0)), id="an evaluation of 60 s in chunks of 1 s"
        ),
        pytest.param(
            lambda rng: HeartbeatSimulation(
                [training_schedule(0.05), training_schedule(0.05), training_schedule(0.5)], rng
            ),
            id="ten times slower",
        ),
        pytest.param(
            lambda rng: HeartbeatSimulation(
                [training_schedule(0.5), training_schedule(0.5), training_schedule(5.0)], rng
            ),
            id="ten times as slow as slow",
        ),
        pytest.param(
            lambda rng: HeartbeatSimulation([training_schedule(20.0), training_schedule(25.0)], rng), id="lanes of 20 s"
        ),
        pytest.param(lambda rng: HeartbeatSimulation([training_schedule(20.0)], rng), id="alone"),
    ],
)
def test_what_is_only_slow_is_left_alone(calm, seed):
    assert calm(random.Random(seed)).run(200) == []


@pytest.mark.parametrize("seed", range(10))
def test_pauses_of_two_seconds_are_left_alone(seed):
    rng = random.Random(seed)
    crew_ = random_simulation(rng)
    for _ in range(15):
        assert crew_.run(rng.uniform(3, 8)) == []
        rng.choice(crew_.workers).paused_s = 2.0


# ---- frozen ----


def test_silence_is_a_verdict():
    suspicion = started()
    assert failure_reasons(suspicion, 100, heartbeat(0, heard_s=2.4), waiting_heartbeat()) == {}
    assert failure_reasons(suspicion, 100.1, heartbeat(0, heard_s=2.6), waiting_heartbeat()) == {
        0: "frozen: not heard for 2.6 s"
    }


def test_one_who_waits_can_be_frozen_too():
    assert 1 in failure_reasons(started(), 100, heartbeat(0), waiting_heartbeat(1, heard_s=2.6))


def test_a_stopped_process_is_found_sooner():
    suspicion = started()
    assert failure_reasons(suspicion, 100, heartbeat(heard_s=1.2, stopped=True), waiting_heartbeat()) == {}
    assert failure_reasons(suspicion, 100.6, heartbeat(heard_s=1.8, stopped=True), waiting_heartbeat()) == {
        0: "frozen: stopped, and not heard for 1.8 s"
    }


def test_a_process_that_was_stopped_for_a_moment_goes_on():
    suspicion = started()
    assert failure_reasons(suspicion, 100, heartbeat(heard_s=1.2, stopped=True), waiting_heartbeat()) == {}
    assert failure_reasons(suspicion, 100.4, heartbeat(), waiting_heartbeat()) == {}
    assert failure_reasons(suspicion, 100.8, heartbeat(heard_s=1.2, stopped=True), waiting_heartbeat()) == {}


def test_imports_may_be_silent_for_longer():
    suspicion = started()
    assert failure_reasons(suspicion, 100, heartbeat(phase="building", heard_s=29), waiting_heartbeat()) == {}
    assert failure_reasons(suspicion, 100.1, heartbeat(phase="building", heard_s=31), waiting_heartbeat()) != {}


def test_clocks_start_anew_when_the_one_who_looks_was_held_up():
    suspicion = started()
    silent = [heartbeat(seat, heard_s=20.0, since_s=20.0, stopped=True) for seat in range(3)]
    assert suspicion.check(120, silent) == []
    assert suspicion.check(121, silent) == []
    heard = [heartbeat(0, since_s=22.0), waiting_heartbeat(1), heartbeat(2, heard_s=22.6)]
    assert suspicion.check(122, heard) == []
    assert failure_reasons(suspicion, 122.6, *heard) == {2: "frozen: not heard for 2.6 s"}


def test_each_is_convicted_once():
    suspicion = started()
    silent = [heartbeat(heard_s=3.0), waiting_heartbeat()]
    assert len(suspicion.check(100, silent)) == 1
    assert suspicion.check(100.1, silent) == []


# ---- hanging ----


def test_the_limit_is_three_seconds_or_eight_times_the_slowest():
    suspicion = started()
    assert failure_reasons(suspicion, 100, heartbeat(since_s=2.9), waiting_heartbeat()) == {}
    assert failure_reasons(
        suspicion, 100.2, heartbeat(since_s=3.1, line="model.py:12 in forward"), waiting_heartbeat()
    ) == {0: "hangs in compute at step 7 for 3.1 s: model.py:12 in forward"}
    suspicion = started()
    for unit in range(3):
        suspicion.check(100 + unit, [heartbeat(units=50 + unit, since_s=1.0), waiting_heartbeat()])
    assert failure_reasons(suspicion, 103, heartbeat(units=52, since_s=7.9), waiting_heartbeat()) == {}
    assert failure_reasons(suspicion, 103.5, heartbeat(units=52, since_s=8.1), waiting_heartbeat()) != {}


def test_another_workers_speed_counts_and_another_phase_does_not():
    suspicion = started()
    for unit in range(3):
        suspicion.check(100 + unit, [heartbeat(0, units=50 + unit, since_s=1.0), heartbeat(1)])
    slow = {"since_s": 5.0}
    assert failure_reasons(suspicion, 103, heartbeat(0, units=53), heartbeat(1, **slow)) == {}
    assert failure_reasons(suspicion, 103.1, heartbeat(0, units=53), heartbeat(1, phase="data", **slow)) != {}


@pytest.mark.parametrize("changes", [{"units_in_phase": 0}, *({"phase": p} for p in ("saving", "telling", "export"))])
def test_what_has_no_usual_time_gets_five_minutes(changes):
    suspicion = started()
    assert failure_reasons(suspicion, 100, heartbeat(since_s=299.0, **changes), waiting_heartbeat()) == {}
    assert failure_reasons(suspicion, 100.1, heartbeat(since_s=301.0, **changes), waiting_heartbeat()) != {}


def test_a_long_first_unit_counts_only_until_the_second_is_done():
    suspicion = started()
    suspicion.check(100, [heartbeat(units=1, units_in_phase=0, since_s=20.0), waiting_heartbeat()])
    assert (
        failure_reasons(suspicion, 100.1, heartbeat(units=2, units_in_phase=1, since_s=30.0), waiting_heartbeat()) == {}
    )
    suspicion.check(100.2, [heartbeat(units=2, units_in_phase=1, since_s=0.1), waiting_heartbeat()])
    assert (
        failure_reasons(suspicion, 100.3, heartbeat(units=3, units_in_phase=2, since_s=3.1), waiting_heartbeat()) != {}
    )


def test_a_later_process_has_as_long_for_its_first_unit_as_those_before_it_showed():
    first = {"units_in_phase": 0}
    assert failure_reasons(started(), 100, heartbeat(units=1, since_s=299.0, **first), waiting_heartbeat()) == {}
    suspicion = started()
    suspicion.check(100, [heartbeat(units=1, since_s=5.0, **first), waiting_heartbeat()])
    suspicion.check(100.1, [heartbeat(units=2, units_in_phase=1), waiting_heartbeat()])
    assert (
        failure_reasons(
            suspicion, 100.2, heartbeat(units=3), waiting_heartbeat(), heartbeat(2, units=1, since_s=39.0, **first)
        )
        == {}
    )
    assert list(
        failure_reasons(
            suspicion, 100.3, heartbeat(units=4), waiting_heartbeat(), heartbeat(2, units=1, since_s=40.1, **first)
        )
    ) == [2]


def test_the_speed_of_a_worker_that_left_is_forgotten():
    suspicion = started()
    for unit in range(3):
        suspicion.check(
            100 + unit, [heartbeat(0, units=50 + unit, since_s=10.0, units_in_phase=0), waiting_heartbeat()]
        )
    now_s = 103.0
    while now_s < 170:
        suspicion.check(now_s, [waiting_heartbeat(1), waiting_heartbeat(2, phase="data", units_in_phase=0)])
        now_s += 0.5
    assert failure_reasons(suspicion, now_s, heartbeat(1, since_s=3.1), waiting_heartbeat(2)) != {}


def test_one_alone_has_more_time():
    suspicion = started()
    assert failure_reasons(suspicion, 100, heartbeat(since_s=29.0)) == {}
    assert failure_reasons(suspicion, 100.1, heartbeat(since_s=31.0)) != {}
    assert failure_reasons(started(), 100, heartbeat(heard_s=2.6)) != {}


def test_a_step_that_hangs_again_gets_twice_the_time_until_it_is_forgiven():
    suspicion = started()
    assert failure_reasons(suspicion, 100, heartbeat(0, since_s=3.1), waiting_heartbeat()) != {}
    for tick in range(200, 240):
        suspicion.check(tick / 2, [waiting_heartbeat(1), waiting_heartbeat(3, phase="waiting")])
    assert failure_reasons(suspicion, 120, heartbeat(1, since_s=5.9), waiting_heartbeat(2)) == {}
    assert failure_reasons(suspicion, 120.2, heartbeat(1, since_s=6.1), waiting_heartbeat(2)) != {}
    assert failure_reasons(suspicion, 120.3, heartbeat(2, since_s=3.1, step=8), waiting_heartbeat(3)) != {}
    suspicion.reset_before(7)
    assert failure_reasons(suspicion, 120.4, heartbeat(4, since_s=3.1), waiting_heartbeat(3)) != {}


def test_two_that_hang_at_once_are_both_found_in_time():
    suspicion = started()
    assert set(failure_reasons(suspicion, 100, heartbeat(0, since_s=3.1), heartbeat(1, since_s=2.9))) == {0}
    assert set(failure_reasons(suspicion, 100.3, heartbeat(0, since_s=3.4), heartbeat(1, since_s=3.2))) == {1}
    for tick in range(201, 220):
        suspicion.check(tick / 2, [waiting_heartbeat(2), waiting_heartbeat(3)])
    assert set(failure_reasons(suspicion, 110, heartbeat(2, since_s=6.1), waiting_heartbeat(3))) == {
        2
    }  # they count as one: twice the time, not 4


# ---- stuck ----


def poll_until(suspicion, begin_s, end_s, signs):
    """The time at which all were first stuck; None if that did not happen."""
    now_s = begin_s
    while now_s < end_s:
        verdicts = suspicion.check(now_s, signs(now_s - begin_s))
        assert verdicts == []
        if suspicion.stalled:
            return now_s - begin_s
        now_s += 0.1
    return None


def test_all_waiting_for_each_other_are_stuck_and_none_is_to_blame():
    suspicion = started()
    assert poll_until(
        suspicion, 100, 110, lambda t: [waiting_heartbeat(0, since_s=t), waiting_heartbeat(1, since_s=t)]
    ) == pytest.approx(4, abs=0.2)


@pytest.mark.parametrize(
    "other",
    [
        lambda t: heartbeat(1, since_s=0.1),
        lambda t: heartbeat(1, phase="saving", since_s=t),
        lambda t: waiting_heartbeat(1, since_s=0.5),
    ],
)
def test_nobody_is_stuck_while_one_works_or_has_just_come(other):
    assert poll_until(started(), 100, 120, lambda t: [waiting_heartbeat(0, since_s=t), other(t)]) is None


def test_one_who_may_be_frozen_is_waited_for_first():
    suspicion = started()
    assert (
        suspicion.check(100, [waiting_heartbeat(0, since_s=9.0), waiting_heartbeat(1, since_s=9.0, heard_s=1.5)]) == []
    )
    assert not suspicion.stalled


def test_nobody_is_stuck_while_something_gets_through():
    """However slow the link is; when nothing moves any more, it takes as long as ever."""

    def signs(t, until):
        return [waiting_heartbeat(0, since_s=t), waiting_heartbeat(1, since_s=t, moved_bytes=int(1000 * min(t, until)))]

    assert poll_until(started(), 100, 160, lambda t: signs(t, until=100)) is None
    assert poll_until(started(), 100, 160, lambda t: signs(t, until=30)) == pytest.approx(34, abs=0.2)


def test_waiting_for_the_driver_is_not_stuck():
    both = [waiting_heartbeat(seat, phase="waiting", since_s=50.0) for seat in (0, 1)]
    assert poll_until(started(), 100, 120, lambda t: both) is None
    assert poll_until(started(), 100, 120, lambda t: [waiting_heartbeat(0, since_s=t)]) is None


def test_it_is_told_once_and_then_gets_twice_the_time():
    suspicion = started()
    signs = lambda t: [waiting_heartbeat(0, since_s=t), waiting_heartbeat(1, since_s=t)]  # noqa: E731
    assert poll_until(suspicion, 100, 120, signs) == pytest.approx(4, abs=0.2)
    assert poll_until(suspicion, 104.2, 107.9, lambda t: signs(t + 4.2)) is None
    assert poll_until(suspicion, 108.0, 140, signs) == pytest.approx(8, abs=0.2)


def test_a_slow_link_is_learned():
    suspicion = started()
    at = lambda step: lambda t: [waiting_heartbeat(0, since_s=t, step=step), waiting_heartbeat(1, since_s=t, step=step)]  # noqa: E731
    assert poll_until(suspicion, 100, 103.5, at(7)) is None
    assert poll_until(suspicion, 103.5, 120, at(8)) is None  # eight times the 3.4 s that the last one took
    assert poll_until(suspicion, 120, 170, at(9)) is None
