"""Correct the inputs of the cost model with times measured in a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shoal.plan.costs.model import Cluster, CostPrediction, HostResources, LaneTime, MeasuredJob, NetworkLink, RunChoice
from shoal.plan.costs.predict import predict
from shoal.plan.costs.worker_layout import slowdown_at

_LEAST, _MOST = 0.1, 1e4
"""Bounds of the correction factor of an exchange."""


@dataclass(frozen=True)
class ObservedTimes:
    """Measured time of a step, and of each worker for one lane (including the lane's own update, if lanes have one):
    by host, the driver's host first, workers from fast to slow."""

    step_s: float
    lane_s: tuple[tuple[float, ...], ...]

    @property
    def workers_per_host(self) -> list[int]:
        return [len(workers) for workers in self.lane_s]


@dataclass(frozen=True)
class CostInputs:
    """The inputs of a prediction."""

    measured: MeasuredJob
    cluster: Cluster
    link: NetworkLink


def predict_for_workers(current: RunChoice, inputs: CostInputs, workers_per_host: Sequence[int]) -> CostPrediction:
    """The prediction for these numbers of workers per host, without measured speeds of the workers."""
    cluster = _with_actual_hosts(inputs.cluster, workers_per_host, current.threads)
    return predict(current, inputs.measured, cluster, inputs.link)


def calibrate(current: RunChoice, inputs: CostInputs, observed: ObservedTimes) -> CostInputs:
    """Correct lane times by the fastest worker, then the speeds of the other workers; the rest of the step time
    corrects the exchange. A single worker exchanges nothing: its whole step is compute."""
    calibrated = replace(inputs, cluster=_with_actual_hosts(inputs.cluster, observed.workers_per_host, current.threads))
    ratios = _slowdown_ratios(current, calibrated, observed)
    fastest = min(ratio for host in ratios for ratio in host)
    hosts = [
        replace(host, each=tuple(fastest / ratio for ratio in mine))
        for host, mine in zip(calibrated.cluster.hosts, ratios, strict=True)
    ]
    calibrated = replace(calibrated, cluster=replace(calibrated.cluster, hosts=tuple(hosts)))
    calibrated = _scale_compute(calibrated, fastest)
    predicted = predict(current, calibrated.measured, calibrated.cluster, calibrated.link)
    if predicted.refused:  # it runs all the same
        return calibrated
    if current.workers > 1:
        return _calibrate_exchange(current, calibrated, observed)
    return _scale_compute(calibrated, observed.step_s / predicted.step_s)


def _with_actual_hosts(cluster: Cluster, workers_per_host: Sequence[int], threads: int) -> Cluster:
    """The driver's host as measured; of other hosts only the number of their workers is known."""
    here = replace(cluster.hosts[0], each=(), brought=0)
    others = [HostResources(number * threads, math.inf, brought=number) for number in workers_per_host[1:]]
    return replace(cluster, hosts=(here, *others))


def _slowdown_ratios(current: RunChoice, inputs: CostInputs, observed: ObservedTimes) -> list[list[float]]:
    """Measured over predicted lane time of every worker."""
    time = inputs.measured.times[current.threads]
    lane_s = time.lane_s + inputs.measured.rest_s + (time.apply_s if current.sync == "local" else 0.0)
    return [
        [taken / (lane_s * slowdown_at(current, inputs.cluster, h, len(mine), k)) for k, taken in enumerate(mine)]
        for h, mine in enumerate(observed.lane_s)
    ]


def _scale_compute(inputs: CostInputs, factor: float) -> CostInputs:
    """Scale all times of compute."""
    measured, machine = inputs.measured, inputs.cluster
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
    return replace(inputs, measured=measured, cluster=machine)


def _calibrate_exchange(current: RunChoice, inputs: CostInputs, observed: ObservedTimes) -> CostInputs:
    """Scale the time of a round on one host, and the link between hosts."""

    def rounds(factor: float) -> CostInputs:
        return replace(inputs, cluster=replace(inputs.cluster, round_s=factor * inputs.cluster.round_s))

    def wire(factor: float) -> CostInputs:
        link = inputs.link
        slow = NetworkLink(factor * link.latency_s, link.send_bytes_s / factor, link.receive_bytes_s / factor)
        return replace(inputs, link=slow)

    way = rounds if current.hosts == 1 else wire
    return way(_fit_factor(lambda factor: _predicted_step_s(current, way(factor)), observed.step_s))


def _predicted_step_s(current: RunChoice, inputs: CostInputs) -> float:
    return predict(current, inputs.measured, inputs.cluster, inputs.link).step_s


def _fit_factor(step_s: Callable[[float], float], observed_s: float) -> float:
    """The factor at which the predicted step time equals the observed one. Step time never decreases with the
    factor."""
    low, high = _LEAST, _MOST
    if step_s(low) >= observed_s:
        return low
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if step_s(middle) > observed_s else (middle, high)
    return low
