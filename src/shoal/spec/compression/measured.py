"""What was measured: typed, because it crosses from a process to the driver, and from a file to a reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from shoal.errors import error
from shoal.spec.base import Spec
from shoal.spec.compression.config import CompressConfig
from shoal.spec.compression.steps import ShapeStep, Step
from shoal.spec.job import WorkersConfig

T = TypeVar("T", bound=Spec)
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
MAX_FILE_BYTES = 1 << 26
REPORT = "compression.json"


class Artefact(Spec):
    """A file that holds a model, as it lies on disk. `difference` is the largest absolute difference between its
    outputs and those of the weights that it was made from, on a batch of training samples."""

    model_config = ConfigDict(allow_inf_nan=True)

    path: str
    size_bytes: PositiveInt
    sha256: Sha256
    difference: float | None = None


class ModelFile(Spec):
    """A file with a model: how its shape differs from what the user's code builds, and where it lies."""

    path: str
    shape: list[ShapeStep] = Field(default_factory=list)


class ShapedModel(Spec):
    """A model after steps that changed it: the new steps, and the file of its weights; None if nothing changed.
    `refused` has what could not be changed, with the reason."""

    steps: list[ShapeStep] = Field(default_factory=list)
    weights: Artefact | None = None
    parameters: NonNegativeInt = 0
    removed: dict[str, NonNegativeInt] = Field(default_factory=dict)
    refused: dict[str, str] = Field(default_factory=dict)
    certificate: Certificate | None = None


class Certificate(Spec):
    """Why a model is equal to its parent.

    `claim` is `proven` (for every input between the smallest and largest values of the training samples, in exact
    arithmetic) or `data` (for the training samples). The differences are the largest absolute differences of outputs
    that were measured: in float64 and float32 on training samples, and in float64 on random points of the box.
    `largest_output` is the parent's largest absolute output on both.
    """

    model_config = ConfigDict(allow_inf_nan=True)

    claim: str
    low: float
    high: float
    samples: NonNegativeInt
    points: NonNegativeInt
    difference_float64: float
    difference_float32: float
    difference_points: float
    largest_output: float = 1.0


class Quality(Spec):
    """A model compared with its parent, sample by sample, on one part of the data.

    `drop` is positive if the model is worse; `drop_bound` is its one-sided 95 % confidence bound. `smallest_bound` is
    the bound that the same number of samples would give if no sample changed.
    """

    model_config = ConfigDict(allow_inf_nan=True)

    name: str = ""
    part: str
    metric: str
    samples: PositiveInt
    parent: float
    value: float
    drop: float
    drop_bound: float
    smallest_bound: float
    changed: NonNegativeInt


class Ratio(Spec):
    """Times of one file divided by those of another in the same round: median and quartiles over the rounds."""

    median: float
    low: float
    high: float


class Latency(Spec):
    """CPU time per call with one thread, by batch size: as ratios to the first file, and to one called `eager`."""

    name: str
    seconds: Annotated[dict[PositiveInt, PositiveFloat], Field(min_length=1)]
    ratios: Annotated[dict[PositiveInt, Ratio], Field(min_length=1)]
    eager: dict[PositiveInt, Ratio] = Field(default_factory=dict)


class RungReport(Spec):
    """One line of the report: what was tried, what came out, whether it was kept, and why.

    `latency` compares with the parent in the same runtime, `eager_ratio` with the parent in torch."""

    name: str
    steps: list[Step] = Field(default_factory=list)
    artefact: Artefact | None = None
    size_ratio: float | None = None
    parameters: NonNegativeInt = 0
    quality: Quality | None = None
    latency: Latency | None = None
    eager_ratio: dict[PositiveInt, float] = Field(default_factory=dict)
    certificate: Certificate | None = None
    refused: dict[str, str] = Field(default_factory=dict)
    kept: bool = False
    why: str = ""


class CompressionReport(Spec):
    """What `shoal compress` did: every rung that was tried, and the result on the test part."""

    parent: str
    parent_sha256: Sha256
    rungs: list[RungReport]
    chosen: str
    targets_met: bool
    test: Quality | None = None
    threads: PositiveInt = 1
    notes: list[str] = Field(default_factory=list)


class Recipe(Spec):
    """How a result was made from its parent. Its steps on the same parent give the same `artefact_sha256`."""

    parent: str
    parent_sha256: Sha256
    job_sha256: Sha256
    steps: list[Step]
    artefact: str
    artefact_sha256: Sha256
    weights_sha256: Sha256


class AskedCompression(Spec):
    """What a compression was asked for, kept while it lasts: one that was killed goes on with that.

    `parent` is the directory of its run. A recipe is replayed; without one the ladder is climbed."""

    parent: str
    config: CompressConfig
    recipe: Recipe | None = None
    workers: WorkersConfig | None = None
    best: bool = False


def read_recipe(path: Path) -> Recipe:
    """SH661 if the file is not a recipe."""
    return _read(Recipe, path)


def read_asked(path: Path) -> AskedCompression:
    """SH661 if the file is not what a compression was asked for."""
    return _read(AskedCompression, path)


def _read(kind: type[T], path: Path) -> T:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError("it is too large")
        return kind.model_validate(json.loads(path.read_bytes()))
    except OSError as failure:
        raise error("SH661", f"it cannot be read: {failure.strerror}", where=str(path)) from failure
    except ValidationError as failure:
        raise error("SH661", _first_problem(failure), where=str(path)) from failure
    except (ValueError, RecursionError) as failure:
        raise error("SH661", f"it is not JSON: {failure}", where=str(path)) from failure


def read_report(path: Path) -> CompressionReport | None:
    """None if the run is not the result of a compression, or the file is damaged."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return None
        return CompressionReport.model_validate(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError):
        return None


def _first_problem(failure: ValidationError) -> str:
    first: Any = failure.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"


ShapedModel.model_rebuild()
