"""What a way to run a job costs, if a seat of a worker or server has a price."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.plan.costs.model import CostPrediction
from shoal.plan.costs.select import PlanCandidate

SECONDS_PER_HOUR = 3600


def epoch_price(prediction: CostPrediction, seat_price: float) -> float:
    """The price of one epoch: every worker and server costs `seat_price` an hour."""
    seats = prediction.choice.workers + prediction.choice.servers
    return seats * seat_price * prediction.epoch_s / SECONDS_PER_HOUR


def cheapest(candidates: Iterable[PlanCandidate], seat_price: float) -> PlanCandidate | None:
    """The candidate with the lowest price that the job allows; of equal ones the fastest. None if none is feasible."""
    usable = [row for row in candidates if row.feasible and row.allowed]
    return min(usable, key=lambda row: (epoch_price(row.prediction, seat_price), row.prediction.epoch_s), default=None)
