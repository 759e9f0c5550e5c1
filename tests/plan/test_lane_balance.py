"""Lanes move to faster workers: soon where one is slow, hardly ever where machines are only noisy."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest

from shoal.plan.lane_assignment import assign_by_speed, assign_evenly, step_s
from shoal.plan.lane_balance import FIRST_COST_S, FIRST_PAUSE_S, LaneBalance, LaneSpeed

HEARTBEAT_S = 0.25
MOVE_S = 0.15
Truth = Callable[[float], Mapping[int, float]]


@dataclass
class SimulatedRun:
    """Steps of some workers whose lanes take as long as `truth` says, times noise. Records when lanes move.

    `sigma` is the spread of a step's time (log-normal). `bursts` per second begin that last `burst_s` on average, in
    which the worker takes `burst_factor` times as long.
    """

    truth: Truth
    seed: int = 0
    lanes: int = 8
    lane_s: float = 0.02
    sigma: float = 0.0
    bursts: float = 0.0
    burst_s: float = 5.0
    burst_factor: float = 2.5
    cost_s: float = FIRST_COST_S

    def run(self, seconds: float) -> SimulatedRun:
        rng = random.Random(self.seed)
        seats = list(self.truth(0.0))
        self.balance, self.moves = LaneBalance(_cost_s=self.cost_s), list[float]()
        self.carries = assign_evenly(self.lanes, seats)
        busy_until, timed = dict.fromkeys(seats, 0.0), dict.fromkeys(seats, (0, 0.0))
        now_s = beat_s = 0.0
        while now_s < seconds:
            slowest = 0.0
            for seat, mine in self.carries.items():
                if mine:
                    if now_s > busy_until[seat] and rng.random() < self.bursts * len(mine) * self.lane_s:
                        busy_until[seat] = now_s + rng.expovariate(1 / self.burst_s)
                    factor = self.burst_factor if now_s < busy_until[seat] else 1.0
                    noise = rng.lognormvariate(-(self.sigma**2) / 2, self.sigma)
                    lane_s = self.lane_s * self.truth(now_s)[seat] * factor * noise
                    timed[seat] = (timed[seat][0] + 1, timed[seat][1] + lane_s)
                    slowest = max(slowest, len(mine) * lane_s)
            now_s += slowest
            if now_s >= beat_s:
                beat_s = now_s + HEARTBEAT_S
                now_s = self._beat(now_s, timed)
        return self

    def _beat(self, now_s: float, timed: Mapping[int, tuple[int, float]]) -> float:
        for seat, (count, total_s) in timed.items():
            self.balance.observe(seat, now_s, count=count, total_s=total_s)
        carrying = {seat: mine for seat, mine in self.carries.items() if mine}
        if not self.balance.should_move(carrying, now_s, needed=[0]):
            return now_s
        self.moves.append(now_s)
        self.balance.moved(now_s + MOVE_S)
        self.carries = assign_by_speed(self.lanes, {s: self.balance.paces.get(s) for s in timed}, needed=[0])
        return now_s + MOVE_S


def equal(number: int) -> Truth:
    return lambda _: dict.fromkeys(range(number), 1.0)


def slow_between(start_s: float, end_s: float, times: float = 2.0) -> Truth:
    return lambda now_s: {0: 1.0, 1: times if start_s <= now_s < end_s else 1.0}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sigma", [0.2, 0.35, 0.5])
def test_noise_alone_moves_nothing(sigma: float, seed: int) -> None:
    for number, lanes, lane_s in ((2, 8, 0.04), (3, 12, 0.05), (2, 4, 0.4)):
        run = SimulatedRun(equal(number), seed=seed, lanes=lanes, lane_s=lane_s, sigma=sigma).run(120)
        assert len(run.moves) <= 1


@pytest.mark.parametrize("seed", range(3))
def test_bursts_of_a_busy_machine_move_lanes_rarely(seed: int) -> None:
    """Every burst is real while it lasts, so a few moves are right; what was wrong is 12 of them in 38 s."""
    for bursts, burst_s, factor in ((0.1, 5.0, 2.5), (0.2, 2.0, 2.0), (0.5, 1.0, 3.0)):
        options = {"bursts": bursts, "burst_s": burst_s, "burst_factor": factor}
        run = SimulatedRun(equal(2), seed=seed, lane_s=0.04, sigma=0.3, **options).run(300)
        assert len(run.moves) <= 14
        assert max((sum(at <= move < at + 40 for move in run.moves) for at in run.moves), default=0) <= 5


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("sigma", "within_s"), [(0.05, 8.0), (0.2, 15.0), (0.4, 40.0)])
def test_a_slow_worker_is_relieved_soon_and_loaded_again_when_it_recovers(
    sigma: float, within_s: float, seed: int
) -> None:
    run = SimulatedRun(slow_between(60, 180), seed=seed, sigma=sigma).run(240)
    away, back = ([at for at in run.moves if start <= at < start + within_s] for start in (60, 180))
    assert away
    assert back
    assert len(run.moves) <= 4
    assert len(run.carries[1]) in (3, 4)


@pytest.mark.parametrize("seed", range(4))
def test_lanes_stay_away_from_a_worker_that_stays_slow(seed: int) -> None:
    run = SimulatedRun(slow_between(0, math.inf, 3.0), seed=seed, sigma=0.3).run(150)
    assert 1 <= len(run.moves) <= 3
    paces = {0: 1.0, 1: 3.0}
    assert step_s(run.carries, paces) <= 1.17 * step_s(assign_by_speed(8, paces), paces)
    assert not [at for at in run.moves if at > 60]


def test_a_difference_that_is_small_is_not_worth_a_move() -> None:
    run = SimulatedRun(lambda _: {0: 1.0, 1: 1.1}, lanes=20, sigma=0.05).run(120)
    assert run.moves == []


def test_the_more_a_move_costs_the_longer_a_difference_must_last() -> None:
    cheap, dear = (
        SimulatedRun(slow_between(60, math.inf), sigma=0.05, cost_s=cost_s).run(120).moves[0] for cost_s in (0.5, 3.0)
    )
    assert cheap + 5 < dear < 100


def test_what_did_not_pay_makes_the_pause_longer_and_what_did_makes_it_shorter() -> None:
    balance, timed = LaneBalance(), {0: (0, 0.0), 1: (0, 0.0)}
    carries = {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}
    now_s = 0.0

    def second(paces: Mapping[int, float]) -> bool:
        nonlocal now_s
        now_s += 1.0
        for seat, pace in paces.items():
            timed[seat] = (timed[seat][0] + 20, timed[seat][1] + 20 * pace)
            balance.observe(seat, now_s, count=timed[seat][0], total_s=timed[seat][1])
        return balance.should_move(carries, now_s)

    while not second({0: 1.0, 1: 3.0}):
        assert now_s < 20
    assert balance.paces == {0: pytest.approx(1.0), 1: pytest.approx(3.0)}
    carries = assign_by_speed(8, balance.paces)
    for _ in range(5):
        second({0: 1.0, 1: 1.0})  # it was over at once
    assert balance._pause_s == 2 * FIRST_PAUSE_S
    while not second({0: 1.0, 1: 1.0}):
        assert now_s < 60
    carries = assign_by_speed(8, balance.paces)
    for _ in range(10):
        second({0: 1.0, 1: 1.0})
    assert balance._pause_s == FIRST_PAUSE_S


def test_stops_between_short_lanes_are_seen() -> None:
    """A worker that stands still for 20 of 30 ms is three times as slow, though most of its lanes take 1 ms."""
    speed = LaneSpeed()
    count, total_s, now_s = 0, 0.0, 0.0
    while len(speed.blocks) < 5:
        for lane in range(10):
            took = 0.021 if lane == 9 else 0.001
            count, total_s, now_s = count + 1, total_s + took, now_s + took
        speed.observe(now_s, count, total_s)
    found = speed.estimate(5)
    assert found is not None
    assert math.exp(found[0]) == pytest.approx(0.003, rel=0.05)


def test_a_worker_that_measured_nothing_new_adds_nothing() -> None:
    speed = LaneSpeed()
    for beat in range(40):
        speed.observe(0.25 * beat, 3, 30.0)
    assert list(speed.blocks) == []
    assert speed.estimate(3) is None
    speed.observe(11.0, 4, 40.0)
    assert list(speed.blocks) == [pytest.approx(math.log(10.0))]
    speed.observe(12.0, 1, 5.0)  # another process with the same seat
    speed.observe(14.0, 2, 6.0)
    assert speed.blocks[-1] == 0.0


def test_nothing_moves_before_everybody_is_measured() -> None:
    balance = LaneBalance()
    for second in range(60):
        balance.observe(0, float(second), count=10 * second, total_s=10.0 * second)
        assert not balance.should_move({0: [0], 1: [1]}, float(second))
    balance.forget(0)
    assert not balance.should_move({0: [0], 1: [1]}, 99.0)
