"""Randomness belongs to a lane at a step, never to a worker."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable

import numpy as np
import torch

from shoal.spec.seeds import derive_seed


class LaneRng:
    """The global generators that a model may draw from: torch's, Python's and numpy's.

    Every lane has seeds of its own for all of them. Few models draw from Python's and numpy's, and seeding those two
    for each lane costs 30 µs between the kernels of a step. So `for_lane` leaves them alone until `missed` says that
    somebody drew from one: that lane has to be done once more, and from then on they are seeded every time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._state_probes = [python_state_probe(), numpy_state_probe()]
        self._always_seed_all = not all(_detects_draws(mark) for mark in self._state_probes)
        self.seed_all(0)

    def seed_lane(self, *numbers: int) -> None:
        if self._always_seed_all:
            self.seed_all(*numbers)
        else:
            self._seed_torch(derive_seed(*numbers))

    def seed_all(self, *numbers: int) -> None:
        seed = derive_seed(*numbers)
        self._seed_torch(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        self._seeded_state = [mark() for mark in self._state_probes]

    def drew_unseeded(self) -> bool:
        """True once: a generator that `for_lane` had left alone was drawn from."""
        if self._always_seed_all or [mark() for mark in self._state_probes] == self._seeded_state:
            return False
        self._always_seed_all = True
        return True

    def _seed_torch(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            torch.cuda.default_generators[self._device.index or 0].manual_seed(seed)
        elif self._device.type == "mps":
            torch.mps.manual_seed(seed)


StateProbe = Callable[[], tuple[int, int]]
"""Looks at a Mersenne twister's position and first word, which no draw leaves as they are. A look, no copy: 0.2 µs."""


def python_state_probe() -> StateProbe:
    """CPython keeps the position and then the words right behind the object's head."""
    place = id(random._inst) + object.__basicsize__
    position, word = ctypes.c_int.from_address(place), ctypes.c_uint32.from_address(place + 4)
    return lambda: (position.value, word.value)


def numpy_state_probe() -> StateProbe:
    """numpy documents where its state lies: 624 words and then the position."""
    place = np.random.mtrand._rand._bit_generator.ctypes.state_address
    position, word = ctypes.c_int.from_address(place + 624 * 4), ctypes.c_uint32.from_address(place)
    return lambda: (position.value, word.value)


def _detects_draws(probe: StateProbe) -> bool:
    """Is the memory what we think it is? If another Python keeps its state elsewhere, every lane is seeded."""
    random.seed(1)
    np.random.seed(1)
    before, again = probe(), probe()
    random.random()  # noqa: S311
    np.random.random()
    return before == again != probe()
