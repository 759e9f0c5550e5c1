"""The space of a search as a unit cube: points to values of job fields, and back.

Every range and every choice is an axis, also those inside an option of a choice. An axis is active where the option
that holds it is chosen; an inactive axis stands at 0.5, so that it does not tell points apart.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.spec.search.rules import count_values, holds
from shoal.spec.search.space import Choice, Dimension, Range, parse_space
from shoal.spec.search.trial_job import changes_of, put

DIGITS = 4
"""Significant digits of a number that the search proposes."""
Cube = NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """A configuration: its place in the cube, as rounded, and the job changes that it stands for. `memory`: what the
    sampler learnt when it proposed it, and begins with at its next proposal."""

    cube: tuple[float, ...]
    changes: Mapping[str, Any]
    memory: tuple[float, ...] = ()

    @cached_property
    def key(self) -> str:
        """Equal for equal configurations."""
        return json.dumps(self.changes, sort_keys=True)


@dataclass(frozen=True)
class Axis:
    """One number of the cube. `holder`: the axis and its option that this axis is part of."""

    values: Range | Choice
    holder: tuple[int, int] | None = None


class Space:
    """A unit cube with an axis for each range and each choice."""

    def __init__(self, space: Mapping[str, Any], *, defaults: Mapping[str, Any] | None = None) -> None:
        """`defaults`: values by key that a partial suggestion leaves as they are."""
        self.dimensions: list[Dimension] = parse_space(space).dimensions
        self.axes: list[Axis] = []
        self._roots: list[int] = []
        self._inner: dict[tuple[int, int, int], int] = {}
        self._defaults = dict(defaults or {})
        for dimension in self.dimensions:
            self._roots.append(self._add(dimension.values, None))

    def _add(self, values: Range | Choice, holder: tuple[int, int] | None) -> int:
        place = len(self.axes)
        self.axes.append(Axis(values, holder))
        for i, option in enumerate(getattr(values, "options", ())):
            for j, (_, nested) in enumerate(option.nested):
                self._inner[place, i, j] = self._add(nested, (place, i))
        return place

    @property
    def size(self) -> int:
        """Number of different configurations; 0 if they cannot be counted."""
        counts = [count_values(dimension.values) for dimension in self.dimensions]
        return 0 if 0 in counts else math.prod(counts)

    def settle(self, cube: Sequence[float] | Cube, taken: Collection[str] = ()) -> Point | None:
        """The configuration at a place; None if it is taken."""
        values = {d.key: self._value(root, cube) for d, root in zip(self.dimensions, self._roots, strict=True)}
        point = self._point(values)
        return None if point.key in taken else point

    def suggest(self, values: Mapping[str, Any]) -> Point:
        """The configuration that a user writes, by key; keys that are left out keep the job's own values."""
        middle = self.settle([0.5] * len(self.axes))
        assert middle is not None
        keys = {d.key: d for d in self.dimensions}
        own = {k: v for k, v in self._defaults.items() if k in keys and holds(keys[k].values, v)}
        missing = {k: self._value(root, middle.cube) for k, root in zip(keys, self._roots, strict=True)}
        return self._point({**missing, **own, **values})

    def candidates(self, generator: np.random.Generator, count: int, *, near: Cube, taken: Collection[str]) -> Cube:
        """Random places, and places at several distances from those in `near`; some of them may be taken."""
        places = [generator.random((count, len(self.axes)))]
        for scale in (0.15, 0.05, 0.015):
            around = np.repeat(near, 12, axis=0)
            kept = generator.random(around.shape) < 0.5
            places.append(np.where(kept, around, around + scale * generator.normal(size=around.shape)).clip(0, 1))
        return self.canonical(np.concatenate(places))

    def canonical(self, cubes: Cube) -> Cube:
        """Places of the configurations at these places, before numbers are rounded: the middle of an option or step."""
        made = np.array(cubes, dtype=np.float64)
        active = np.ones(made.shape, dtype=bool)
        for i, axis in enumerate(self.axes):
            if axis.holder is not None:
                place, option = axis.holder
                count = self._counts[place]
                active[:, i] = active[:, place] & (np.floor(made[:, place] * count) == option)
            if self._counts[i]:
                steps = np.minimum(np.floor(made[:, i] * self._counts[i]), self._counts[i] - 1)
                made[:, i] = (steps + 0.5) / self._counts[i]
            made[~active[:, i], i] = 0.5
        return made

    @cached_property
    def _counts(self) -> list[int]:
        """Number of options or steps of each axis; 0 for those that are divided evenly nowhere."""
        found = []
        for axis in self.axes:
            values = axis.values
            even = isinstance(values, Choice) or values.step is not None or (values.whole and not values.log)
            found.append(_steps(values) if even else 0)
        return found

    def key_of(self, axis: int) -> str:
        """The key of the space that an axis belongs to."""
        while (holder := self.axes[axis].holder) is not None:
            axis = holder[0]
        return self.dimensions[self._roots.index(axis)].key

    def walk(self) -> Iterator[Point]:
        """Every configuration of a space that can be counted, the last dimension fastest."""
        for values in itertools.product(*(list(_all_values(d.values)) for d in self.dimensions)):
            yield self._point(dict(zip((d.key for d in self.dimensions), values, strict=True)))

    def active(self, cube: Sequence[float] | Cube) -> list[bool]:
        """Which axes have a meaning at this place."""
        state: list[bool] = []
        for axis in self.axes:
            holder = axis.holder
            state.append(holder is None or (state[holder[0]] and self._option(holder[0], cube) == holder[1]))
        return state

    def features(self, cubes: Cube) -> Cube:
        """Points for a distance: a choice without an order has one column per option."""
        columns = []
        for i, axis in enumerate(self.axes):
            column = cubes[:, i : i + 1]
            if isinstance(axis.values, Choice) and not axis.values.ordered:
                count = len(axis.values.options)
                chosen = np.minimum((column * count).astype(np.int64), count - 1)
                column = (chosen == np.arange(count)[None, :]) * math.sqrt(0.5)
            columns.append(np.asarray(column, dtype=np.float64))
        return np.concatenate(columns, axis=1)

    def _point(self, values: Mapping[str, Any]) -> Point:
        cube = [0.5] * len(self.axes)
        for dimension, root in zip(self.dimensions, self._roots, strict=True):
            self._encode(root, values[dimension.key], cube)
        return Point(tuple(cube), changes_of(self.dimensions, values))

    def _option(self, place: int, cube: Sequence[float] | Cube) -> int:
        values = self.axes[place].values
        assert isinstance(values, Choice)
        return min(int(float(cube[place]) * len(values.options)), len(values.options) - 1)

    def _value(self, place: int, cube: Sequence[float] | Cube) -> Any:
        values = self.axes[place].values
        if isinstance(values, Range):
            return number_at(values, float(cube[place]))
        chosen = self._option(place, cube)
        option = values.options[chosen]
        made = copy.deepcopy(option.value)
        for j, (at, _) in enumerate(option.nested):
            made = put(made, at, self._value(self._inner[place, chosen, j], cube))
        return made

    def _encode(self, place: int, value: Any, cube: list[float]) -> None:
        values = self.axes[place].values
        if isinstance(values, Range):
            cube[place] = place_of(values, value)
            return
        chosen = next(i for i, o in enumerate(values.options) if holds(Choice((o,)), value))
        cube[place] = (chosen + 0.5) / len(values.options)
        for j, (at, _) in enumerate(values.options[chosen].nested):
            part = value
            for key in at:
                part = part[key]
            self._encode(self._inner[place, chosen, j], part, cube)


def _steps(values: Range | Choice) -> int:
    return len(values.options) if isinstance(values, Choice) else count_values(values)


def _all_values(values: Range | Choice) -> Iterator[Any]:
    if isinstance(values, Range):
        count = count_values(values)
        stepped = Range(values.low, values.high, step=values.step, whole=values.whole)
        yield from (number_at(stepped, (i + 0.5) / count) for i in range(count))
        return
    for option in values.options:
        for parts in itertools.product(*(list(_all_values(nested)) for _, nested in option.nested)):
            made = copy.deepcopy(option.value)
            for (at, _), part in zip(option.nested, parts, strict=True):
                made = put(made, at, part)
            yield made


def number_at(values: Range, place: float) -> int | float:
    """The number of a range at a place from 0 to 1, rounded so that it is readable."""
    place = min(max(place, 0.0), 1.0)
    if values.step is not None or (values.whole and not values.log):
        step = values.step or 1
        count = int((values.high - values.low) / step + 1e-9) + 1
        number = values.low + min(int(place * count), count - 1) * step
        return int(number) if values.whole else round_digits(number, 12)
    if values.log:
        number = math.exp(math.log(values.low) + place * (math.log(values.high) - math.log(values.low)))
    else:
        number = values.low + place * (values.high - values.low)
    if values.whole:
        return int(min(max(round(number), values.low), values.high))
    return min(max(round_digits(number, DIGITS), values.low), values.high)


def place_of(values: Range, number: float) -> float:
    """The inverse of `number_at`, up to rounding."""
    if values.step is not None or (values.whole and not values.log):
        step = values.step or 1
        count = int((values.high - values.low) / step + 1e-9) + 1
        return (min(round((number - values.low) / step), count - 1) + 0.5) / count
    if values.log:
        return (math.log(number) - math.log(values.low)) / (math.log(values.high) - math.log(values.low))
    return (number - values.low) / (values.high - values.low)


def round_digits(number: float, digits: int) -> float:
    return float(f"{number:.{digits}g}")
