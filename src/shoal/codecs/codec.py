"""What all codecs promise, and the checks that they share."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from shoal.errors import error


class Codec(Protocol):
    """Turns a stretch of float32 values into bytes and back.

    Both directions are pure functions of what is given: the same values and memory give the same bytes, in every run
    and on every worker, and the same bytes the same values. Nothing is drawn at random. Stretches and bytes are flat,
    contiguous, on one device, and begin at a multiple of 4 bytes (of 64 for `lowrank`, whose products of matrices may
    add in another order elsewhere). A codec keeps scratch memory: it is used by one thread at a time.

    A value that is not finite leads to one that is not finite in what is decoded, so that training notices.
    """

    @property
    def exact(self) -> bool:
        """No bit changes."""

    @property
    def needs_residual(self) -> bool:
        """It sends so little that what was lost must be added to the next values, or training goes astray."""

    @property
    def adds_residual(self) -> bool:
        """What was lost is added to the next values as it is, and nothing else is done to them."""

    def size_bytes(self, count: int) -> int:
        """What `count` values take: known before, whatever they are."""

    def residual_floats(self, count: int) -> int:
        """How long `before` and `after` are. The first `count` are what was lost."""

    def encode(
        self,
        values: Tensor,
        out: Tensor,
        *,
        residual_in: Tensor | None = None,
        residual_out: Tensor | None = None,
        decoded: Tensor | None = None,
    ) -> None:
        """Fill `out`, exactly `size_bytes` long.

        With `after`, what is lost is left there, and what was lost before (none if there is no `before`) is added to
        the values first. The two may be the same tensor; two of them allow a step to be done again. Values that lie in
        `after` itself have what was lost before in them already, which is possible where the codec `adds`.

        With `back`, what will be decoded is left there, to the bit: who finds what is lost has it already. It may be
        the values themselves.
        """

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        """The values into `out`, or added to what is there: the same bits as decoding first and adding then."""


def check_encode(
    codec: Codec,
    values: Tensor,
    out: Tensor,
    residual_in: Tensor | None,
    residual_out: Tensor | None,
    decoded: Tensor | None,
) -> int:
    """The number of values, if everything fits."""
    count = _check_floats(values, "values")
    _check_bytes(out, codec.size_bytes(count))
    if decoded is not None and _check_floats(decoded, "back") != count:
        raise ValueError(f"`back` holds {decoded.numel()} values instead of {count}")
    if residual_in is not None and residual_out is None:
        raise ValueError("there is a memory from before, and no room for the next one")
    for name, residual in (("before", residual_in), ("after", residual_out)):
        if residual is not None and _check_floats(residual, name) != codec.residual_floats(count):
            raise ValueError(f"`{name}` holds {residual.numel()} values instead of {codec.residual_floats(count)}")
    return count


def shares_memory(values: Tensor, residual_out: Tensor) -> bool:
    """Do the values lie in `after`?"""
    return values.data_ptr() == residual_out.data_ptr()


def check_decode(codec: Codec, data: Tensor, out: Tensor) -> int:
    """The number of values, if everything fits."""
    count = _check_floats(out, "out")
    _check_bytes(data, codec.size_bytes(count))
    return count


def _check_floats(tensor: Tensor, name: str) -> int:
    if tensor.dtype != torch.float32:
        kind = str(tensor.dtype).removeprefix("torch.")
        fix = "Use `codec: none`, or a model whose parameters are float32."
        raise error("SH110", f"codecs take float32 values, and these are {kind}", where="codec", fix=fix)
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(f"`{name}` is not one flat stretch")
    return tensor.numel()


def _check_bytes(data: Tensor, size_bytes: int) -> None:
    if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous():
        raise ValueError("the encoded values are not one flat stretch of bytes")
    if data.numel() != size_bytes:
        raise ValueError(f"{data.numel()} bytes, where the values take {size_bytes}")
    if data.data_ptr() % 4:
        raise ValueError("the encoded values do not begin at a multiple of 4 bytes")


class ScratchBuffers:
    """Gives the same memory whenever the same name is asked for. For one thread."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def get(self, name: str, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """`count` elements that hold anything; valid until the name is asked for again."""
        key = (name, dtype, device)
        kept = self._buffers.get(key)
        if kept is None or kept.numel() < count:
            kept = self._buffers[key] = torch.empty(count, dtype=dtype, device=device)
        return kept[:count]
