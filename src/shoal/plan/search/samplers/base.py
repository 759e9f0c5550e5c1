"""The seam of samplers, and the two that learn nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from shoal.plan.search.ledger import Ledger
from shoal.plan.search.space import Cube, Point

TRIES = 256
"""Random places that are tried before a space counts as used up."""


class TrialSampler(Protocol):
    """`propose` reads the ledger and returns a configuration that was not tried; None if there is none left.

    It is a pure function of the ledger and of `number`, the trial's number. What it wants to remember goes into the
    `memory` of the point, which the journal keeps: a driver that goes on with a search makes a new sampler.
    """

    def propose(self, ledger: Ledger, number: int) -> Point | None: ...


class RandomSampler:
    """Uniform in the unit cube."""

    def propose(self, ledger: Ledger, number: int) -> Point | None:
        return first_free(ledger, random_places(ledger, number))


class SobolSampler:
    """Points of a scrambled Sobol sequence, which fill the cube more evenly than random ones."""

    def propose(self, ledger: Ledger, number: int) -> Point | None:
        return first_free(ledger, [sobol_place(ledger, number), *random_places(ledger, number)])


class GridSampler:
    """Every configuration once, the last dimension of the space fastest."""

    def propose(self, ledger: Ledger, number: int) -> Point | None:
        return first_free(ledger, [])


def random_places(ledger: Ledger, number: int) -> Cube:
    return ledger.generator(1, number).random((TRIES, len(ledger.space.axes)))


def sobol_place(ledger: Ledger, number: int) -> Cube:
    """Point `number` of the sequence. It is the same for any history."""
    from scipy.stats import qmc

    engine = qmc.Sobol(len(ledger.space.axes), scramble=True, rng=ledger.generator(2))
    if number:
        engine.fast_forward(number)
    return np.asarray(engine.random(1)[0], dtype=np.float64)


def first_free(ledger: Ledger, places: Iterable[Cube] | Cube) -> Point | None:
    """The configuration at the first place that is not taken; else any free one of a space that can be counted."""
    taken = ledger.taken
    for place in places:
        point = ledger.space.settle(place, taken)
        if point is not None:
            return point
    return next((p for p in ledger.space.walk() if p.key not in taken), None) if ledger.space.size else None
