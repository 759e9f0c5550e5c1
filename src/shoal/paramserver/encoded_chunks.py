"""Chunks of encoded lanes: servers hold equal parts of the model, however its gradients are encoded.

A codec encodes bucket by bucket, and a bucket may be most of the model. So chunks are smaller than buckets, and a push
has only the encoded bytes from which a server decodes its own values. Where chunks end does not change the values.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from shoal.codecs.size import FLOAT_BYTES
from shoal.collectives.buckets import Bucket, EncodedLayout
from shoal.net.errors import LinkError
from shoal.spec import chunk_table
from shoal.spec.chunk_table import ParameterPiece, allowed_boundary

PARTS = 48
"""Chunks that a model has at least, if they are not too small: equal shares for 2, 3, 4, 6, 8, 12 and 16 servers."""


class _Cut(NamedTuple):
    """The values [start, stop) of a bucket."""

    bucket: Bucket
    start: int
    stop: int

    @property
    def values(self) -> int:
        return (self.bucket.stop - self.bucket.start) // FLOAT_BYTES


class EncodedChunks:
    """With `cut_tensors` a chunk may end inside a tensor. Clipping by norm needs the norms of whole tensors."""

    def __init__(self, encoded_layout: EncodedLayout, *, cut_tensors: bool) -> None:
        self.encoded_layout = encoded_layout
        self.offsets = _chunk_offsets(encoded_layout, cut_tensors=cut_tensors)
        """Chunk i is the bytes [offsets[i], offsets[i + 1]) of the flat buffer; the last chunk is the tail."""

    def max_bytes(self, piece: ParameterPiece) -> int:
        """The largest size of one encoded lane's part in a push of this piece."""
        if self._is_tail(piece):
            return self.encoded_layout.tail_bytes
        return sum(cut.bucket.codec.max_cut_bytes(cut.values, cut.start, cut.stop) for cut in self._cuts(piece))

    def parts(self, piece: ParameterPiece, encoded_lane: Tensor) -> list[Tensor]:
        """What a server needs of an encoded lane for this piece; views where possible."""
        if self._is_tail(piece):
            return [self.encoded_layout.tail(encoded_lane)]
        return [
            part
            for cut in self._cuts(piece)
            for part in cut.bucket.codec.cut(cut.bucket.encoded_bytes(encoded_lane), cut.values, cut.start, cut.stop)
        ]

    def decode(self, piece: ParameterPiece, data: Tensor, flat_buffers: Sequence[Tensor]) -> None:
        """Decode the parts of as many lanes as there are flat buffers. LinkError if `data` is not exactly that."""
        try:
            for flat_buffer in flat_buffers:
                data = data[self._decode_lane(piece, data, flat_buffer) :]
        except (ValueError, RuntimeError, IndexError) as failure:
            raise LinkError(f"sent encoded values that cannot be decoded: {failure!r:.200}") from failure
        if data.numel():
            raise LinkError(f"sent {data.numel()} bytes more than the encoded values")

    def _decode_lane(self, piece: ParameterPiece, data: Tensor, flat_buffer: Tensor) -> int:
        """Returns the number of bytes that the lane takes."""
        if self._is_tail(piece):
            flat_buffer[piece.start : piece.stop].copy_(data[: self.encoded_layout.tail_bytes])
            return self.encoded_layout.tail_bytes
        used = 0
        for cut in self._cuts(piece):
            out = cut.bucket.values(flat_buffer)[cut.start : cut.stop]
            used += cut.bucket.codec.decode_cut(data[used:], cut.values, cut.start, cut.stop, out)
        return used

    def _is_tail(self, piece: ParameterPiece) -> bool:
        return piece.start >= self.encoded_layout.grads_bytes

    def _cuts(self, piece: ParameterPiece) -> Iterator[_Cut]:
        for bucket in self.encoded_layout.buckets:
            start, stop = max(piece.start, bucket.start), min(piece.stop, bucket.stop)
            if start < stop:
                yield _Cut(bucket, (start - bucket.start) // FLOAT_BYTES, (stop - bucket.start) // FLOAT_BYTES)


def _chunk_offsets(encoded_layout: EncodedLayout, *, cut_tensors: bool) -> list[int]:
    """Boundaries of buckets, and inside buckets that are larger than a chunk should be."""
    layout = encoded_layout.layout
    extents = sorted((slot.start, slot.size_bytes) for slot in layout.grads if slot.size_bytes)
    starts = [start for start, _ in extents]
    largest = max(chunk_table.MIN_CHUNK_BYTES, encoded_layout.grads_bytes // PARTS)
    offsets = {0, layout.size_bytes}
    for bucket in encoded_layout.buckets:
        size = bucket.stop - bucket.start
        count = max(size // largest, 1)
        for i in range(1, count):
            point = bucket.start + size * i // count
            extent = extents[bisect_right(starts, point) - 1]
            offsets.add(allowed_boundary(point, extent) if cut_tensors else extent[0])
        offsets |= {bucket.start, bucket.stop}
    return sorted(offsets)
