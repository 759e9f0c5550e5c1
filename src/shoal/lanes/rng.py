"""Random seeds belong to a lane at a step, never to a worker."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable

import numpy as np
import torch

from shoal.spec.seeds import derive_seed


class LaneRng:
    """The global generators that a model may draw from: torch's, Python's and numpy's.

    Every lane has its own seeds for all of them. Few models draw from Python's and numpy's, and seeding those two for
    each lane costs 30 µs. So `seed_lane` skips them until `drew_unseeded` reports a draw: that lane must be computed
    again, and from then on they are seeded every time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._state_probes = [python_state_probe(), numpy_state_probe()]
        self._always_seed_all = not all(_detects_draws(probe) for probe in self._state_probes)
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
        self._seeded_state = [probe() for probe in self._state_probes]

    def drew_unseeded(self) -> bool:
        """True once: the model drew from a generator that `seed_lane` had skipped."""
        if self._always_seed_all or [probe() for probe in self._state_probes] == self._seeded_state:
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
"""Reads a Mersenne twister's position and first word, which every draw changes, in place and in 0.2 µs."""


def python_state_probe() -> StateProbe:
    """CPython stores the position and then the words directly behind the object's header."""
    address = id(random._inst) + object.__basicsize__
    position, word = ctypes.c_int.from_address(address), ctypes.c_uint32.from_address(address + 4)
    return lambda: (position.value, word.value)


def numpy_state_probe() -> StateProbe:
    """numpy documents the layout of its state: 624 words and then the position."""
    address = np.random.mtrand._rand._bit_generator.ctypes.state_address
    position, word = ctypes.c_int.from_address(address + 624 * 4), ctypes.c_uint32.from_address(address)
    return lambda: (position.value, word.value)


def _detects_draws(probe: StateProbe) -> bool:
    """Whether the probe reads the generators' state. If another Python stores it elsewhere, every lane is seeded."""
    random.seed(1)
    np.random.seed(1)
    before, again = probe(), probe()
    random.random()  # noqa: S311
    np.random.random()
    return before == again != probe()
