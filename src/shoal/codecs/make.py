"""Build the codec of a job's `codec` section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shoal.codecs.cast import Cast
from shoal.codecs.codec import Codec, ScratchBuffers
from shoal.codecs.int8 import Int8
from shoal.codecs.lowrank import LowRank
from shoal.codecs.packed_int import INT3, INT4, PackedInt
from shoal.codecs.sign import SignBits
from shoal.codecs.size import Shape
from shoal.codecs.topk import TopK

CAST_DTYPES = {"none": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_codec(
    settings: Mapping[str, Any], *, shapes: Sequence[Shape] = (), scratch: ScratchBuffers | None = None
) -> Codec:
    """`settings` is the section as plain data. A codec handles any number of values, except `lowrank`: it handles
    exactly the tensors of `shapes`, one after the other (`size.shapes_within` gives the shapes of a piece).

    Codecs that the same thread uses may share scratch memory.
    """
    scratch = scratch or ScratchBuffers()
    kind = settings["kind"]
    if kind in CAST_DTYPES:
        return Cast(CAST_DTYPES[kind], scratch)
    if kind == "int8":
        return Int8(settings["block"], scratch)
    if kind == "int4":
        return PackedInt(INT4, settings["block"], scratch)
    if kind == "int3":
        return PackedInt(INT3, settings["block"], scratch)
    if kind == "sign":
        return SignBits(scratch)
    if kind == "topk":
        return TopK(settings["keep"], settings.get("momentum"), scratch)
    if kind == "lowrank":
        return LowRank(settings["rank"], shapes, scratch)
    raise ValueError(f"there is no codec '{kind}'")
