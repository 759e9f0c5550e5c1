"""Randomness belongs to a lane at a step, never to a worker."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable

import numpy as np
import torch

from shoal.spec.seeds import mix


class Chance:
    """The global generators that a model may draw from: torch's, Python's and numpy's.

    Every lane has seeds of its own for all of them. Few models draw from Python's and numpy's, and seeding those two
    for each lane costs 30 µs between the kernels of a step. So `for_lane` leaves them alone until `missed` says that
    somebody drew from one: that lane has to be done once more, and from then on they are seeded every time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks = [python_mark(), numpy_mark()]
        self._all = not all(_shows_a_draw(mark) for mark in self._marks)
        self.fully(0)

    def for_lane(self, *numbers: int) -> None:
        if self._all:
            self.fully(*numbers)
        else:
            self._seed_torch(mix(*numbers))

    def fully(self, *numbers: int) -> None:
        seed = mix(*numbers)
        self._seed_torch(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        self._untouched = [mark() for mark in self._marks]

    def missed(self) -> bool:
        """True once: a generator that `for_lane` had left alone was drawn from."""
        if self._all or [mark() for mark in self._marks] == self._untouched:
            return False
        self._all = True
        return True

    def _seed_torch(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            torch.cuda.default_generators[self._device.index or 0].manual_seed(seed)
        elif self._device.type == "mps":
            torch.mps.manual_seed(seed)


Mark = Callable[[], tuple[int, int]]
"""Looks at a Mersenne twister's position and first word, which no draw leaves as they are. A look, no copy: 0.2 µs."""


def python_mark() -> Mark:
    """CPython keeps the position and then the words right behind the object's head."""
    place = id(random._inst) + object.__basicsize__
    position, word = ctypes.c_int.from_address(place), ctypes.c_uint32.from_address(place + 4)
    return lambda: (position.value, word.value)


def numpy_mark() -> Mark:
    """numpy documents where its state lies: 624 words and then the position."""
    place = np.random.mtrand._rand._bit_generator.ctypes.state_address
    position, word = ctypes.c_int.from_address(place + 624 * 4), ctypes.c_uint32.from_address(place)
    return lambda: (position.value, word.value)


def _shows_a_draw(mark: Mark) -> bool:
    """Is the memory what we think it is? If another Python keeps its state elsewhere, every lane is seeded."""
    random.seed(1)
    np.random.seed(1)
    before, again = mark(), mark()
    random.random()  # noqa: S311
    np.random.random()
    return before == again != mark()
