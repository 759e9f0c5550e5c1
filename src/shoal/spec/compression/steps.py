"""The steps of a recipe. Steps that change the shape of a model are part of the job of a compressed run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
)

from shoal.spec.base import Spec

_RANGES = re.compile(r"\d{1,9}(-\d{1,9})?(,\d{1,9}(-\d{1,9})?)*")
MAX_KEPT = 1 << 24


def format_indices(indices: Iterable[int]) -> str:
    """Ascending indices as text: 0, 1, 2, 5 is "0-2,5"."""
    parts: list[list[int]] = []
    for index in indices:
        if parts and parts[-1][-1] == index - 1:
            parts[-1] = [parts[-1][0], index]
        else:
            parts.append([index])
    return ",".join("-".join(map(str, part)) for part in parts)


def parse_indices(text: str) -> list[int]:
    """The indices of a text that `format_indices` made. ValueError if they do not ascend, or are too many."""
    if not _RANGES.fullmatch(text):
        raise ValueError("write ascending indices and ranges: 0-5,7")
    ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
    flat = [end for part in ends for end in part]
    if any(first >= second for first, second in pairwise(flat)) or flat[-1] >= MAX_KEPT:
        raise ValueError("the indices must ascend")
    return [index for part in ends for index in range(part[0], part[-1] + 1)]


class Kept(Spec):
    """What is left of a layer. `out` and `inputs` are kept indices of its outputs and inputs; None: all.

    Before inputs are removed, the bias gets what constant inputs contribute (`constants`: value by input), and the
    weights of an input are added to those of another one that always has the same value (`merged`). `wide`
    is the side that keeps its width for the code around the layer: removed outputs are zeros, removed inputs are not
    read. `heads` has the kept heads of a torch.nn.MultiheadAttention.
    """

    out: str | None = None
    inputs: str | None = None
    constants: dict[NonNegativeInt, float] = Field(default_factory=dict)
    merged: dict[NonNegativeInt, NonNegativeInt] = Field(default_factory=dict)
    wide: Literal["out", "inputs"] | None = None
    heads: str | None = None

    @model_serializer(mode="wrap")
    def _without_unused(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Fields for heads are left out if they are not set: the identity of a job has no place for them."""
        unset = [name for name in ("wide", "heads") if getattr(self, name) is None]
        return {name: value for name, value in write(self).items() if name not in unset}

    @field_validator("out", "inputs", "heads")
    @classmethod
    def _ascending(cls, text: str | None) -> str | None:
        if text is not None:
            parse_indices(text)
        return text


class DenseStep(Spec):
    """Layers that keep their weight transposed (Conv1D of Hugging Face's transformers) become dense layers of torch,
    which compute the same: all other steps know these."""

    kind: Literal["dense"] = "dense"
    layers: list[str]


class FoldStep(Spec):
    """Batch norms that become part of the layer before them: pairs of names (layer, norm)."""

    kind: Literal["fold"] = "fold"
    pairs: list[tuple[str, str]]


class CutStep(Spec):
    """Outputs and inputs of layers are removed, by name of the layer."""

    kind: Literal["cut"] = "cut"
    layers: dict[str, Kept]


class LowRankStep(Spec):
    """Linear layers become products of two thinner ones: rank by name of the layer."""

    kind: Literal["low_rank"] = "low_rank"
    layers: dict[str, PositiveInt]


class MaskStep(Spec):
    """Weights that are zero at the start of the training stay zero, in these layers."""

    kind: Literal["mask"] = "mask"
    layers: list[str]


class RoundStep(Spec):
    """Weights are used as multiples of a scale per output, and trained through the rounding: bits by layer."""

    kind: Literal["round"] = "round"
    layers: dict[str, Annotated[int, Field(ge=2, le=8)]]


class ShareStep(Spec):
    """Each weight of a layer is one of 2 ** bits values, which are trained; which one it is stays: bits by layer."""

    kind: Literal["share"] = "share"
    layers: dict[str, Annotated[int, Field(ge=2, le=8)]]


ShapeStep = Annotated[
    DenseStep | FoldStep | CutStep | LowRankStep | MaskStep | RoundStep | ShareStep, Field(discriminator="kind")
]


class TuneStep(Spec):
    """Training of the compressed shape, as an ordinary run: from the weights that the steps before left, or from
    scratch; with or without the parent as teacher. `lr` multiplies the rate of the parent's job. `hold` has a step that
    restricts the weights while they are trained."""

    kind: Literal["tune"] = "tune"
    epochs: PositiveInt = 2
    lr: PositiveFloat = 0.1
    teacher: bool = False
    scratch: bool = False
    hold: Annotated[MaskStep | RoundStep | ShareStep, Field(discriminator="kind")] | None = None


class ZeroStep(Spec):
    """The smallest weights of layers become zero: the share that is kept, by layer."""

    kind: Literal["zero"] = "zero"
    keep: dict[str, Annotated[float, Field(gt=0, le=1)]]


class OnnxStep(Spec):
    """The model is written as model.onnx: with 32-bit floats, or with 8-bit weights and activations whose ranges are
    those of the training samples."""

    kind: Literal["onnx"] = "onnx"
    bits: Literal[8, 32] = 32
    samples: PositiveInt = 512


class PackStep(Spec):
    """The model is written as model.packed: each weight is one of 2 ** bits values of its layer, and the numbers of
    these values are entropy coded. The weights of `rounded` layers are multiples of a scale per output instead."""

    kind: Literal["pack"] = "pack"
    bits: Annotated[int, Field(ge=2, le=8)] = 4
    rounded: list[str] = Field(default_factory=list)


Step = Annotated[
    DenseStep | FoldStep | CutStep | LowRankStep | ZeroStep | TuneStep | OnnxStep | PackStep,
    Field(discriminator="kind"),
]


class ModelShape(Spec):
    """How a job's model differs from what the user's code builds: steps, in order."""

    steps: list[ShapeStep] = Field(min_length=1)
