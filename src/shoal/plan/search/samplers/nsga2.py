"""NSGA-II: a genetic search. Children of the best trials by front and crowding, with crossover and mutation."""

from __future__ import annotations

import numpy as np

from shoal.plan.search.ledger import Ledger, TrialState
from shoal.plan.search.samplers.base import first_free, random_places
from shoal.plan.search.space import Cube, Point
from shoal.spec.search.space import Choice

PARENTS = 20
CROSSOVER = 0.9
SPREAD = 15.0
"""Distribution index of crossover and mutation: larger values keep children nearer to their parents."""
TRIES = 32


class Nsga2Sampler:
    """The parents are the best 20 of all trials so far; before there are that many, trials are random."""

    def propose(self, ledger: Ledger, number: int) -> Point | None:
        known = [t for t in ledger.searched() if t.rows and t.status != "failed"]
        places = random_places(ledger, number)
        if len(known) >= PARENTS:
            generator = ledger.generator(7, number)
            parents = _parents(ledger, known)
            places = np.array([*(self._child(ledger, parents, generator) for _ in range(TRIES)), *places])
        return first_free(ledger, places)

    def _child(self, ledger: Ledger, parents: Cube, generator: np.random.Generator) -> Cube:
        one, other = (parents[generator.integers(0, len(parents), size=2).min()] for _ in range(2))
        child = _crossover(ledger, one, other, generator) if generator.random() < CROSSOVER else one.copy()
        return _mutate(ledger, child, generator)


def _parents(ledger: Ledger, known: list[TrialState]) -> Cube:
    """Places of the best, best first: a tournament of two is won by the smaller index."""
    level = sorted((t.reached for t in known), reverse=True)[min(PARENTS, len(known)) - 1]
    return np.array([t.point.cube for t in ledger.ranking([t for t in known if t.reached >= level])[:PARENTS]])


def _crossover(ledger: Ledger, one: Cube, other: Cube, generator: np.random.Generator) -> Cube:
    """Simulated binary crossover for numbers, either parent's value for choices."""
    draw = generator.random(len(one))
    beta = np.where(draw < 0.5, (2 * draw) ** (1 / (SPREAD + 1)), (1 / (2 * (1 - draw))) ** (1 / (SPREAD + 1)))
    mixed = 0.5 * ((1 + beta) * one + (1 - beta) * other)
    swap = generator.random(len(one)) < 0.5
    taken = np.where(swap, one, other)
    return np.where(_choices(ledger), taken, np.where(swap, mixed, one)).clip(0, 1)


def _mutate(ledger: Ledger, child: Cube, generator: np.random.Generator) -> Cube:
    """Polynomial mutation of one axis on average; a choice is drawn anew."""
    draw, fresh = generator.random(len(child)), generator.random(len(child))
    power = 1 / (SPREAD + 1)
    delta = np.where(draw < 0.5, (2 * draw) ** power - 1, 1 - (2 * (1 - draw)) ** power)
    changed = np.where(_choices(ledger), fresh, (child + delta).clip(0, 1))
    return np.where(generator.random(len(child)) < 1 / len(child), changed, child)


def _choices(ledger: Ledger) -> Cube:
    return np.array([isinstance(a.values, Choice) and not a.values.ordered for a in ledger.space.axes])
