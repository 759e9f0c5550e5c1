"""What a user asks for: the sections `compress` and `distil` of a job."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from shoal.spec.base import Ref, Spec

Rung = Literal["lossless", "unused", "int8", "prune", "low_bits", "pack", "low_rank"]
RUNGS: tuple[Rung, ...] = ("lossless", "int8", "prune", "low_bits", "pack", "low_rank")
"""The rungs of `steps: auto`, cheap ones first."""
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


def parse_share(value: Any) -> Any:
    """A share as a number: "25%" is 0.25. Other values are returned as they are."""
    if isinstance(value, str):
        match = _PERCENT.fullmatch(value)
        if match is None:
            raise ValueError("write a percentage (25%) or a share (0.25)")
        return float(match[1]) / 100
    return value


class TargetConfig(Spec):
    """What the compressed model must come to, as a share of the parent: size of the file, and time per call."""

    size: Annotated[float, Field(gt=0, lt=1)] | None = None
    latency: Annotated[float, Field(gt=0, lt=1)] | None = None

    @property
    def is_set(self) -> bool:
        return self.size is not None or self.latency is not None

    @field_validator("size", "latency", mode="before")
    @classmethod
    def _share(cls, value: Any) -> Any:
        return parse_share(value)


class TuneConfig(Spec):
    """How a pruned model is trained on: epochs, and the factor of the job's learning rate."""

    epochs: PositiveInt = 2
    lr: PositiveFloat = 1.0
    scratch: bool = True
    teacher: bool = True


class CompressConfig(Spec):
    """What `shoal compress` does with a run of this job, unless its options say otherwise.

    `max_drop`: how much worse the result may be in the metric of `best`: in points (of 1) if larger is better, else
    as a share of the parent's value. It must hold for the 95 % confidence bound on the validation part.
    """

    target: TargetConfig = Field(default_factory=TargetConfig)
    max_drop: Annotated[float, Field(ge=0, lt=1)] = 0.005
    steps: Literal["auto"] | list[Rung] = "auto"
    tune: TuneConfig = Field(default_factory=TuneConfig)
    importance: Literal["magnitude", "taylor", "zeros"] = "magnitude"
    box: Literal["range", "features"] = "range"

    @field_validator("max_drop", mode="before")
    @classmethod
    def _share(cls, value: Any) -> Any:
        return parse_share(value)

    @property
    def rungs(self) -> tuple[Rung, ...]:
        return RUNGS if self.steps == "auto" else tuple(self.steps)


class ShrinkConfig(Spec):
    """The model becomes smaller during training: after the first evaluation at or after the share `at` of the steps,
    the share `keep` of the channels, neurons and heads of every group is kept, those with the largest weights. The
    optimizer's state is cut along. A second run continues from there."""

    at: Annotated[float, Field(gt=0, lt=1)] = 0.3
    keep: Annotated[float, Field(gt=0, lt=1)] = 0.6

    @field_validator("at", "keep", mode="before")
    @classmethod
    def _share(cls, value: Any) -> Any:
        return parse_share(value)


class DistilConfig(Spec):
    """A teacher: its predictions, and its features if some are named, become part of the loss.

    `teacher`: the weights, given like `init_from.path`. `model`: what they belong to; without it, the job's own model
    before any compression. `weight` is the share of the teacher in the loss, `features` maps modules of the model to
    modules of the teacher whose outputs they imitate.
    """

    teacher: str
    model: Ref | None = None
    weight: Annotated[float, Field(gt=0, le=1)] = 0.5
    temperature: Annotated[float, Field(gt=0, lt=math.inf)] = 2.0
    features: dict[str, str] = Field(default_factory=dict)
    feature_weight: PositiveFloat = 1.0
