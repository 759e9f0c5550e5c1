"""Settings of the training loop."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from shoal.spec.base import Spec


class AverageConfig(Spec):
    """Averaged weights are evaluated and exported instead of those that are trained.

    `ema` is an exponential moving average with `decay`, `swa` the plain mean. Both begin at step `start` and take the
    weights of every `every`-th step from there.
    """

    kind: Literal["ema", "swa"] = "ema"
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    start: NonNegativeInt = 0
    every: PositiveInt = 1
