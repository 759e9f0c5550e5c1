"""What the policy knows of a job and of a node. The caller makes these views anew for each decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NodeId = Any
"""Anything hashable that names a node."""
Allocation = Mapping[str, tuple[NodeId, ...]]
"""By job: the node of each of its workers. Equal nodes stand together. A job without workers may be absent."""


class SpeedCurve(Protocol):
    """How fast a job is with a number of workers. The policy keeps what it computed as long as the object is the same,
    so a new measurement makes a new curve."""

    @property
    def most(self) -> int:
        """The largest number of workers for which the curve may be trusted."""

    @property
    def measured(self) -> bool:
        """Whether speeds are in units of work per second. If not, only their ratios mean something."""

    def speeds(self, workers: Ints, nodes: Ints) -> Floats:
        """Units of work per second, for each pair of a number of workers and the number of their nodes."""


@dataclass(frozen=True, slots=True)
class JobView:
    """A job that wants workers. It gets none, or `least` to `most` of them, in whole gangs.

    `gang`: workers of one replica. `slots`, `memory_bytes`: what one worker takes of its node. `remaining`: work that
    is left, in the curve's unit; None if nobody knows. `submitted_s`: since when it may run. `served_s`: for how long
    it has had workers. `waited_s`: for how long it counts as having waited; None: since it may run, without the time
    with workers. `resize_s`: for how long a change of its workers stops it.
    """

    id: str
    curve: SpeedCurve
    least: int = 1
    most: int = 1
    gang: int = 1
    priority: int = 0
    user: str = ""
    submitted_s: float = 0.0
    served_s: float = 0.0
    waited_s: float | None = None
    remaining: float | None = None
    slots: int = 1
    memory_bytes: int = 0
    resize_s: float = 0.3


@dataclass(frozen=True, slots=True)
class NodeView:
    """A machine: how many slots (cores or accelerators) and how much memory it gives to workers."""

    slots: int
    memory_bytes: int = 2**62
