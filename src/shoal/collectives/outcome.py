"""How a step ends. Failure is a value here: a step counts, or it is discarded with a reason."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Committed:
    """The step counts: the replica has changed.

    `halt` is true if any member asked for it: all members learn of it in the same step. `waited_s` is the part of the
    exchange in which nothing moved because peers were not ready, `exchange_s` the rest of it. With a codec,
    `bytes_plain` is what would have been sent without it.
    """

    loss: Tensor
    bytes_sent: int = 0
    halt: bool = False
    waited_s: float = 0.0
    exchange_s: float = 0.0
    bytes_plain: int | None = None


@dataclass(frozen=True)
class Discarded:
    """The step does not count: the replica is as before it. A new view must follow."""

    why: str
