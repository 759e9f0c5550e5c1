"""All codecs, and what every test does with them."""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from shoal.codecs.codec import Codec
from shoal.codecs.make import make_codec
from shoal.codecs.size import Shape

NONE = {"kind": "none"}
BF16 = {"kind": "bf16"}
FP16 = {"kind": "fp16"}
INT8 = {"kind": "int8", "block": 256}
INT4 = {"kind": "int4", "block": 64}
INT3 = {"kind": "int3", "block": 256}
SIGN = {"kind": "sign"}
TOPK = {"kind": "topk", "keep": 0.01, "momentum": None}
DGC = {"kind": "topk", "keep": 0.1, "momentum": 0.9}
LOWRANK = {"kind": "lowrank", "rank": 2}
ALL = [
    NONE,
    BF16,
    FP16,
    INT8,
    {"kind": "int8", "block": 7},
    INT4,
    {"kind": "int4", "block": 10},
    INT3,
    {"kind": "int3", "block": 7},
    SIGN,
    TOPK,
    {**TOPK, "keep": 0.5},
    DGC,
    LOWRANK,
]
LOSSY = ALL[1:]


def codec_id(settings: dict[str, Any]) -> str:
    return "-".join(str(value) for value in settings.values() if value is not None)


def shapes_of(count: int) -> list[Shape]:
    """A matrix, a convolution's weights and a vector, as far as there is room for them."""
    shapes: list[Shape] = []
    for shape in ((13, 17), (8, 3, 3, 3)):
        if torch.Size(shape).numel() <= count:
            shapes.append(shape)
            count -= torch.Size(shape).numel()
    return [*shapes, (count,)]


def codec_for(settings: dict[str, Any], count: int) -> Codec:
    return make_codec(settings, shapes=shapes_of(count))


def output_buffer(codec: Codec, count: int) -> Tensor:
    return torch.empty(codec.size_bytes(count), dtype=torch.uint8)


def encoded(codec: Codec, values: Tensor, **residual: Any) -> Tensor:
    out = output_buffer(codec, values.numel())
    codec.encode(values, out, **residual)
    return out


def decoded(codec: Codec, data: Tensor, count: int) -> Tensor:
    out = torch.full((count,), 7.0)
    codec.decode(data, out)
    return out


def round_trip(codec: Codec, values: Tensor) -> Tensor:
    return decoded(codec, encoded(codec, values), values.numel())


COUNTS = st.one_of(st.integers(0, 40), st.integers(41, 700), st.sampled_from([1023, 1024, 1025, 2049, 5000]))


@st.composite
def gradients(draw: st.DrawFn, counts: st.SearchStrategy[int] = COUNTS) -> Tensor:
    """Gradients of many sizes, with zeros, ties and values too small to be normal among them."""
    count = draw(counts)
    made = torch.randn(count, generator=torch.Generator().manual_seed(draw(st.integers(0, 1 << 32))))
    made *= 10.0 ** draw(st.integers(-36, 30))
    few = draw(st.lists(st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 1e-30, 1.0, -1.0, 1e30]), max_size=20))
    for i, value in enumerate(few[:count]):
        made[(i * 7919) % count] = value
    if draw(st.booleans()):
        made[: count // 2] = 0.0
    return made
