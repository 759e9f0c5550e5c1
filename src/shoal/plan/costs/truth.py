"""The facts of a plan, put right by what a run takes in truth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shoal.plan.costs.crew import slowness_at
from shoal.plan.costs.facts import Choice, Host, LaneTime, Link, Machine, Measured, Prediction
from shoal.plan.costs.predict import predict

_LEAST, _MOST = 0.1, 1e4
"""Between these factors an exchange is believed."""


@dataclass(frozen=True)
class Truth:
    """What a step takes, and what each worker takes for a lane of it (an update of its own included, where lanes have
    such): by host, the driver's first, from fast to slow."""

    step_s: float
    lane_s: tuple[tuple[float, ...], ...]

    @property
    def numbers(self) -> list[int]:
        return [len(there) for there in self.lane_s]


@dataclass(frozen=True)
class Setting:
    """What predictions are made from."""

    measured: Measured
    machine: Machine
    link: Link


def expected(now: Choice, setting: Setting, numbers: Sequence[int]) -> Prediction:
    """Of so many workers on each host, nothing being known of how fast they are."""
    there = _as_it_stands(setting.machine, numbers, now.threads)
    return predict(now, setting.measured, there, setting.link)


def corrected(now: Choice, setting: Setting, truth: Truth) -> Setting:
    """Lanes first, by the fastest worker; then how much slower the others are; what is left of the step is the
    exchange's. Who is alone exchanges nothing: there all of it is work."""
    there = replace(setting, machine=_as_it_stands(setting.machine, truth.numbers, now.threads))
    ratios = _ratios(now, there, truth)
    fastest = min(ratio for host in ratios for ratio in host)
    hosts = [
        replace(host, each=tuple(fastest / ratio for ratio in mine))
        for host, mine in zip(there.machine.hosts, ratios, strict=True)
    ]
    there = replace(there, machine=replace(there.machine, hosts=tuple(hosts)))
    there = _slower(there, fastest)
    said = predict(now, there.measured, there.machine, there.link)
    if said.refused:  # it goes nevertheless
        return there
    if now.workers > 1:
        return _with_exchange(now, there, truth)
    return _slower(there, truth.step_s / said.step_s)


def _as_it_stands(machine: Machine, numbers: Sequence[int], threads: int) -> Machine:
    """The driver's host as it was measured; of the others is known how many workers they brought."""
    here = replace(machine.hosts[0], each=(), brought=0)
    others = [Host(number * threads, math.inf, brought=number) for number in numbers[1:]]
    return replace(machine, hosts=(here, *others))


def _ratios(now: Choice, there: Setting, truth: Truth) -> list[list[float]]:
    """How many times as long as was measured every worker takes, all that disturbs it being as expected."""
    time = there.measured.times[now.threads]
    lane_s = time.lane_s + there.measured.rest_s + (time.apply_s if now.sync == "local" else 0.0)
    return [
        [taken / (lane_s * slowness_at(now, there.machine, h, len(mine), k)) for k, taken in enumerate(mine)]
        for h, mine in enumerate(truth.lane_s)
    ]


def _slower(there: Setting, factor: float) -> Setting:
    """All that a core does."""
    measured, machine = there.measured, there.machine
    times = {
        threads: LaneTime(*(factor * value for value in (it.forward_s, it.backward_s, it.apply_s)))
        for threads, it in measured.times.items()
    }
    codecs = {
        name: replace(it, encode_s=factor * it.encode_s, decode_s=factor * it.decode_s)
        for name, it in measured.codecs.items()
    }
    machine = replace(machine, add_bytes_s=machine.add_bytes_s / factor)
    measured = replace(measured, times=times, codecs=codecs, rest_s=factor * measured.rest_s)
    return replace(there, measured=measured, machine=machine)


def _with_exchange(now: Choice, there: Setting, truth: Truth) -> Setting:
    """On one host rounds take longer than was thought; between hosts it is the link."""

    def rounds(factor: float) -> Setting:
        return replace(there, machine=replace(there.machine, round_s=factor * there.machine.round_s))

    def wire(factor: float) -> Setting:
        link = there.link
        slow = Link(factor * link.latency_s, link.send_bytes_s / factor, link.receive_bytes_s / factor)
        return replace(there, link=slow)

    way = rounds if now.hosts == 1 else wire
    return way(_fitted(lambda factor: _step_s(now, way(factor)), truth.step_s))


def _step_s(now: Choice, setting: Setting) -> float:
    return predict(now, setting.measured, setting.machine, setting.link).step_s


def _fitted(step_s: Callable[[float], float], true_s: float) -> float:
    """The factor with which the step takes as long as it does. More of it never makes a step shorter."""
    low, high = _LEAST, _MOST
    if step_s(low) >= true_s:
        return low
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if step_s(middle) > true_s else (middle, high)
    return low
