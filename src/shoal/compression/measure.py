"""Measurement: confidence bounds for models that saw the same samples, and times of models that run in turns."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch

from shoal.spec.compression.measured import Latency, Ratio

Z = 1.6448536269514722
"""The 95 % quantile of the normal distribution."""
LEAST_VALUES = 30


def upper_bound_of_flips(lost: int, won: int, samples: int) -> float:
    """The one-sided 95 % bound of the share lost minus the share won, by Tango's score interval for paired
    proportions, which also holds if nothing was lost."""
    low, high = (lost - won) / samples, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        if _score(lost, won, samples, middle) > -Z:
            low = middle
        else:
            high = middle
    return high


def _score(lost: int, won: int, samples: int, difference: float) -> float:
    a = 2 * samples
    b = -lost - won + (2 * samples - lost + won) * difference
    c = -won * difference * (1 - difference)
    nuisance = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
    variance = samples * (2 * nuisance + difference * (1 - difference))
    distance = lost - won - samples * difference
    return distance / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, distance)


def upper_bound_of_mean(differences: Sequence[float]) -> float:
    """The one-sided 95 % bound of the mean, by Student's distribution. It holds for means of few values only if they
    are normal, which differences of losses are not: below `LEAST_VALUES` there is no bound."""
    from scipy.special import stdtrit

    count = len(differences)
    if count < LEAST_VALUES:
        return math.inf
    mean = fmean(differences)
    deviation = math.sqrt(sum((d - mean) ** 2 for d in differences) / (count - 1))
    return mean + float(stdtrit(count - 1, 0.95)) * deviation / math.sqrt(count)


def drop_of(parent: Sequence[float], model: Sequence[float], *, sign: int) -> tuple[float, float, float]:
    """How much worse the model is: in points if larger is better, else as a share of the parent's mean. Its bound, and
    the bound that this number of samples would give if no sample changed."""
    if _are_flags(parent) and _are_flags(model):
        pairs = list(zip(parent, model, strict=True))
        lost, won = (sum((a - b) * sign == wanted for a, b in pairs) for wanted in (1, -1))
        drop = (lost - won) / len(pairs)
        return drop, upper_bound_of_flips(lost, won, len(pairs)), upper_bound_of_flips(0, 0, len(pairs))
    scale = 1.0 if sign > 0 else abs(fmean(parent)) or 1.0
    differences = [(a - b) * sign / scale for a, b in zip(parent, model, strict=True)]
    return fmean(differences), upper_bound_of_mean(differences), 0.0 if len(differences) >= LEAST_VALUES else math.inf


def _are_flags(values: Sequence[float]) -> bool:
    return all(value in (0.0, 1.0) for value in values)


# ---- times: only ratios within one round mean something on a machine with other work ----

ROUNDS = 15
ROUND_S = 0.004
MAX_CALLS = 200


@torch.no_grad()
def measure_in_turns(
    models: Mapping[str, Callable[..., Any]], batches: Mapping[int, Sequence[Any]], *, rounds: int = ROUNDS
) -> list[Latency]:
    """CPU time per call of each model, and its ratios to the first model and to the one named `eager`, if there is
    one, in the same round, by batch size.

    The caller sets the number of threads to one: CPU time is then the time of the call without that of other programs.
    """
    seconds: dict[str, dict[int, list[float]]] = {name: {} for name in models}
    for size, inputs in batches.items():
        calls = {name: _calls(model, inputs) for name, model in models.items()}
        for _ in range(rounds):
            for name, model in models.items():
                seconds[name].setdefault(size, []).append(_time(model, inputs, calls[name]))
    first, eager = seconds[next(iter(models))], seconds.get("eager", {})
    return [
        Latency(
            name=name,
            seconds={size: statistics.median(values) for size, values in rows.items()},
            ratios={size: _ratio(values, first[size]) for size, values in rows.items()},
            eager={size: _ratio(values, eager[size]) for size, values in rows.items() if size in eager},
        )
        for name, rows in seconds.items()
    ]


def _calls(model: Callable[..., Any], inputs: Sequence[Any]) -> int:
    """How many calls make a round: enough for the clock. The first calls warm the model up."""
    _time(model, inputs, 3)
    return max(1, min(int(ROUND_S / max(_time(model, inputs, 2), 1e-7)), MAX_CALLS))


def _time(model: Callable[..., Any], inputs: Sequence[Any], calls: int) -> float:
    start = time.process_time_ns()
    for _ in range(calls):
        model(*inputs)
    return max(time.process_time_ns() - start, 1) / calls / 1e9


def _ratio(values: Sequence[float], base: Sequence[float]) -> Ratio:
    ratios = sorted(a / b for a, b in zip(values, base, strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    return Ratio(median=middle, low=low, high=high)
