"""What the processes of a compression answer, by question: checked before anybody decides by it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, NonNegativeInt

from shoal.spec.base import Spec
from shoal.spec.compression.measured import Latency, Quality, Sha256


class ScoresPart(Spec):
    """The file with the importance of channels on some lanes."""

    path: str
    lanes: list[NonNegativeInt]


class RangesPart(Spec):
    """The smallest and largest values on some lanes, by name."""

    ranges: dict[str, tuple[float, float]]


class AnsweredParts(Spec):
    """The answers of all workers."""

    parts: list[dict[str, Any]]


class JudgedModels(Spec):
    found: list[Quality]


class TimedModels(Spec):
    found: list[Latency]


class LayerSizes(Spec):
    """How many weights each layer has."""

    weights: dict[str, NonNegativeInt]


class LayerShares(Spec):
    """The share of the weights that each layer keeps."""

    keep: dict[str, Annotated[float, Field(gt=0, le=1)]]


class ExportFacts(Spec):
    """What the receipt of the result says of the model."""

    weights_sha256: Sha256
    parameters: NonNegativeInt
    samples: dict[str, NonNegativeInt]
    skipped: list[str]
    platform: dict[str, str]
