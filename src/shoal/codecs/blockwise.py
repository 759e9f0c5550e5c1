"""Codecs that process values piece by piece. Each piece fits in a core's cache.

So several passes over the values cost about as much as one, and scratch memory stays small.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from shoal.codecs.codec import ScratchBuffers, aligned_parts, check_decode, check_encode, shares_memory

PIECE = 1 << 18  # measured: with half of it, kernel launches cost more than the caches save
ACCELERATOR_PIECE = 1 << 24  # accelerators are fastest with few large kernels


class BlockwiseCodec(ABC):
    """The loop over the pieces. The residual is computed by decoding what was just encoded."""

    exact = False
    needs_residual = False
    adds_residual = True
    alignment = 1  # every piece but the last holds a multiple of this many values

    def __init__(self, scratch: ScratchBuffers) -> None:
        self._scratch = scratch

    @abstractmethod
    def size_bytes(self, count: int) -> int: ...

    @abstractmethod
    def _sections(self, data: Tensor, count: int) -> tuple[Tensor, ...]:
        """The sections of the encoded bytes, each as a typed view."""

    @abstractmethod
    def _encode_piece(self, values: Tensor, sections: tuple[Tensor, ...], start: int) -> None:
        """Encode the piece that begins at value number `start`."""

    @abstractmethod
    def _decode_piece(self, sections: tuple[Tensor, ...], start: int, out: Tensor) -> None:
        """Decode the piece that begins at value number `start`."""

    def _decode_last_piece(self, sections: tuple[Tensor, ...], start: int, out: Tensor) -> None:
        """Decode the piece that was encoded last. The result is the same, to the bit, as `_decode_piece`."""
        self._decode_piece(sections, start, out)

    def residual_floats(self, count: int) -> int:
        return count

    def encode(
        self,
        values: Tensor,
        out: Tensor,
        *,
        residual_in: Tensor | None = None,
        residual_out: Tensor | None = None,
        decoded: Tensor | None = None,
    ) -> None:
        count = check_encode(self, values, out, residual_in, residual_out, decoded)
        if not self.residual_floats(count):
            residual_in = residual_out = None
        in_residual = residual_out is not None and shares_memory(values, residual_out)
        sections = self._sections(out, count)
        for start, stop in self._pieces(count, values.device):
            piece = values[start:stop]
            if residual_out is not None and not in_residual:
                left = residual_out[start:stop]
                piece = (
                    left.copy_(piece) if residual_in is None else torch.add(piece, residual_in[start:stop], out=left)
                )
            self._encode_piece(piece, sections, start)
            if residual_out is not None or decoded is not None:
                room = self._float_buffer(piece) if decoded is None else decoded[start:stop]
                self._decode_last_piece(sections, start, room)
                if residual_out is not None:
                    piece.sub_(room)

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        count = check_decode(self, data, out)
        sections = self._sections(data, count)
        for start, stop in self._pieces(count, out.device):
            piece = out[start:stop]
            if not add:
                self._decode_piece(sections, start, piece)
                continue
            decoded = self._float_buffer(piece)
            self._decode_piece(sections, start, decoded)
            piece.add_(decoded)

    # ---- a range of the values ----

    def cut(self, data: Tensor, count: int, start: int, stop: int) -> list[Tensor]:
        first, last = self._whole_blocks(count, start, stop)
        scales, body = self._scales_bytes(first), self._scales_bytes(count) + self._body_bytes(first)
        return [
            data[scales : self._scales_bytes(last)],
            data[body : self._scales_bytes(count) + self._body_bytes(last)],
        ]

    def max_cut_bytes(self, count: int, start: int, stop: int) -> int:
        first, last = self._whole_blocks(count, start, stop)
        return self.size_bytes(last - first)

    def decode_cut(self, data: Tensor, count: int, start: int, stop: int, out: Tensor) -> int:
        first, last = self._whole_blocks(count, start, stop)
        found = aligned_parts(data, self.size_bytes(last - first))
        if (first, last) == (start, stop):
            self.decode(found, out)
        else:
            room = torch.empty(last - first, dtype=torch.float32)
            self.decode(found, room)
            out.copy_(room[start - first : stop - first])
        return found.numel()

    def _whole_blocks(self, count: int, start: int, stop: int) -> tuple[int, int]:
        """The smallest range around the values whose encoded bytes are those of a shorter sequence of values."""
        return start // self.alignment * self.alignment, min(-(-stop // self.alignment) * self.alignment, count)

    def _scales_bytes(self, count: int) -> int:
        """Size of the section in front, with one scale per block."""
        return 0

    def _body_bytes(self, count: int) -> int:
        return self.size_bytes(count) - self._scales_bytes(count)

    def _pieces(self, count: int, device: torch.device) -> Iterable[tuple[int, int]]:
        return pieces(count, self.alignment, device)

    def _float_buffer(self, like: Tensor) -> Tensor:
        return self._scratch.get("piece", like.numel(), torch.float32, like.device)

    def _block_rows(self, piece: Tensor) -> Tensor:
        """One row per block. The rest after the last full block is a piece of its own: one shorter row."""
        return piece.view(-1, min(self.alignment, piece.numel()))


def pieces(count: int, alignment: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Start and stop of each piece. Pieces hold whole blocks of `alignment` values; the last may hold less than one."""
    most = PIECE if device.type == "cpu" else ACCELERATOR_PIECE
    step = max(most // alignment, 1) * alignment
    whole = count // alignment * alignment
    yield from ((start, min(start + step, whole)) for start in range(0, whole, step))
    if whole < count:
        yield whole, count
