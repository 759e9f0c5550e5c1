"""The contract of all codecs, their shared checks, and their scratch memory."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from shoal.errors import error


class Codec(Protocol):
    """Encodes a flat range of float32 values to bytes, and decodes it.

    Both directions are pure functions: the same values and residual give the same bytes in every run and on every
    worker, and the same bytes give the same values. There is no randomness. Values and bytes are flat, contiguous, on
    one device, and aligned to 4 bytes (64 bytes for `lowrank`, whose matrix products may otherwise add in another
    order). A codec keeps scratch memory: one thread uses it at a time.

    A value that is not finite decodes to a value that is not finite, so that training notices.
    """

    @property
    def exact(self) -> bool:
        """Whether decoding returns every bit unchanged."""

    @property
    def needs_residual(self) -> bool:
        """Whether training diverges without error feedback: the loss of a step must be added to the next values."""

    @property
    def adds_residual(self) -> bool:
        """Whether error feedback is plain addition: the residual is added to the next values and nothing else."""

    def size_bytes(self, count: int) -> int:
        """Encoded size of `count` values. It does not depend on the values."""

    def residual_floats(self, count: int) -> int:
        """Length of `residual_in` and `residual_out`. The first `count` floats are the encoding error."""

    def encode(
        self,
        values: Tensor,
        out: Tensor,
        *,
        residual_in: Tensor | None = None,
        residual_out: Tensor | None = None,
        decoded: Tensor | None = None,
    ) -> None:
        """Fill `out`, which is exactly `size_bytes` long.

        With `residual_out`, the codec first adds `residual_in` (zero if None) to the values, and then writes the new
        encoding error to `residual_out`. Both may be the same tensor; with two tensors a step can be repeated. If
        `values` is the memory of `residual_out` itself, the old residual is already in it, which is allowed if
        `adds_residual`.

        With `decoded`, the values that `decode` will return are written there, to the bit. Codecs with error feedback
        compute them anyway. It may be `values` itself.
        """

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        """Write the values to `out`, or add them to it: the same bits as decoding first and adding afterwards."""

    def cut(self, data: Tensor, count: int, start: int, stop: int) -> list[Tensor]:
        """The parts of the encoded bytes of `count` values that `decode_cut` needs for the values [start, stop)."""

    def max_cut_bytes(self, count: int, start: int, stop: int) -> int:
        """The largest size of these parts together."""

    def decode_cut(self, data: Tensor, count: int, start: int, stop: int, out: Tensor) -> int:
        """Write the values [start, stop) to `out`: the same bits as `decode`. Returns how many bytes of `data` the
        parts take. ValueError if `data` does not begin with such parts."""


def check_encode(
    codec: Codec,
    values: Tensor,
    out: Tensor,
    residual_in: Tensor | None,
    residual_out: Tensor | None,
    decoded: Tensor | None,
) -> int:
    """The number of values. Raises if a tensor has the wrong type or size."""
    count = _check_floats(values, "values")
    _check_bytes(out, codec.size_bytes(count))
    if decoded is not None and _check_floats(decoded, "decoded") != count:
        raise ValueError(f"`decoded` holds {decoded.numel()} values instead of {count}")
    if residual_in is not None and residual_out is None:
        raise ValueError("`residual_in` is given without `residual_out`")
    for name, residual in (("residual_in", residual_in), ("residual_out", residual_out)):
        if residual is not None and _check_floats(residual, name) != codec.residual_floats(count):
            raise ValueError(f"`{name}` holds {residual.numel()} values instead of {codec.residual_floats(count)}")
    return count


def shares_memory(values: Tensor, residual_out: Tensor) -> bool:
    """Whether `values` is the memory of `residual_out`."""
    return values.data_ptr() == residual_out.data_ptr()


def check_decode(codec: Codec, data: Tensor, out: Tensor) -> int:
    """The number of values. Raises if a tensor has the wrong type or size."""
    count = _check_floats(out, "out")
    _check_bytes(data, codec.size_bytes(count))
    return count


def aligned_parts(data: Tensor, size_bytes: int) -> Tensor:
    """The first bytes of data that came from another process, aligned to 4 bytes."""
    if data.numel() < size_bytes:
        raise ValueError(f"{data.numel()} bytes of encoded values; expected {size_bytes}")
    found = data[:size_bytes]
    return found.clone() if found.data_ptr() % 4 else found


def _check_floats(tensor: Tensor, name: str) -> int:
    if tensor.dtype != torch.float32:
        kind = str(tensor.dtype).removeprefix("torch.")
        fix = "Use `codec: none`, or a model whose parameters are float32."
        raise error("SH110", f"codecs take float32 values, but these are {kind}", where="codec", fix=fix)
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(f"`{name}` is not flat and contiguous")
    return tensor.numel()


def _check_bytes(data: Tensor, size_bytes: int) -> None:
    if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous():
        raise ValueError("the encoded values are not flat, contiguous bytes")
    if data.numel() != size_bytes:
        raise ValueError(f"{data.numel()} bytes of encoded values; expected {size_bytes}")
    if data.data_ptr() % 4:
        raise ValueError("the encoded values are not aligned to 4 bytes")


class ScratchBuffers:
    """Buffers that are reused by name, because page faults of fresh memory cost more than the work done in it. For one
    thread."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def get(self, name: str, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """`count` uninitialised elements, valid until the next `get` of the same name."""
        key = (name, dtype, device)
        kept = self._buffers.get(key)
        if kept is None or kept.numel() < count:
            kept = self._buffers[key] = torch.empty(count, dtype=dtype, device=device)
        return kept[:count]
