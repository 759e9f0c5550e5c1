"""States to save, and how to tell that two are the same to the last bit."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from shoal.checkpoint.tensor_bytes import DTYPE_CODES, bytes_of


def bit_equal(a: Any, b: Any) -> bool:
    """Equal types, orders, values and bits; NaN is itself."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and (a.dtype, a.shape) == (b.dtype, b.shape) and bytes_of(a) == bytes_of(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(bit_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(bit_equal, a, b))
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b) and str(a) == str(b)  # str tells 0.0 from -0.0


def training_state(step: int) -> dict[str, Any]:
    """What a run would save: half of it frozen, all of it a function of the step."""
    made = torch.Generator().manual_seed(step)
    return {
        "model": {"frozen": torch.arange(65536.0), "head": torch.randn(300, 300, generator=made)},
        "optimizer": {"state": {0: {"step": torch.tensor(float(step)), "exp": torch.randn(9, generator=made)}}},
        "step": step,
    }


class EventRecorder:
    """Remembers the events that a store emitted."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, kind: str, /, **fields: Any) -> None:
        self.events.append((kind, fields))

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.events if event == kind]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any dtype and bits; 0-dimensional, empty, transposed and strided ones too."""
    dtype = draw(st.sampled_from(sorted(DTYPE_CODES, key=str)))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    raw = draw(st.binary(min_size=1, max_size=16))
    size = math.prod(shape) * dtype.itemsize
    content = bytearray((raw * (size // len(raw) + 1))[:size])
    if dtype is torch.bool:
        content = bytearray(byte & 1 for byte in content)
    flat = torch.frombuffer(content, dtype=torch.uint8).clone() if size else torch.empty(0, dtype=torch.uint8)
    tensor = flat.view(dtype).reshape(shape)
    if tensor.dim() > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, 1)
    if tensor.dim() and draw(st.booleans()):
        tensor = tensor[::2]
    return tensor


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
keys = (
    st.text(max_size=4) | st.sampled_from(["0", "1", "~", "/", "a/b", "~i0", "~0", "__metadata__"]) | st.integers(-2, 2)
)
states = st.recursive(
    scalars | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)
