"""Gradient buckets: a lane's gradients in runs of whole tensors, each encoded by itself.

A bucket is sent as soon as backward has finished its tensors, while backward computes the next one. Bucket boundaries
follow from the model alone, so all workers agree on them. Values that are not gradients follow unencoded: the tail.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.codecs.codec import Codec, ScratchBuffers
from shoal.codecs.make import make_codec
from shoal.codecs.size import FLOAT_BYTES, Shape
from shoal.collectives.tree_reduce import SumTree, TreeReduce, build_sum_tree
from shoal.errors import error
from shoal.lanes.flat_layout import FlatLayout, TensorSlot, align_up
from shoal.lanes.reduction_tree import Node

BUCKET_BYTES = 2 << 20  # measured: with half of it top-k takes a third longer, with more of it less is sent early
FIRST_BUCKET_BYTES = 1 << 19  # smaller than the others, because the network is idle until it is sent
BucketParams = Sequence[Sequence[int]]


class ResidualBanks(Protocol):
    """The error feedback residual of a lane, or of one fragment of it."""

    def before_and_after(self, start: int, stop: int) -> tuple[Tensor | None, Tensor]: ...


@dataclass(frozen=True)
class Bucket:
    """Encodes the bytes [start, stop) of the flat buffer into `size_bytes` at `offset` of the encoded lane.

    `residual_range` is the bucket's part of the lane's residual. `gaps` are padding in the flat buffer; they are
    encoded too.
    """

    codec: Codec
    start: int
    stop: int
    offset: int
    size_bytes: int
    residual_range: tuple[int, int]
    gaps: Sequence[slice]

    def encode(
        self,
        flat_buffer: Tensor,
        encoded_lane: Tensor,
        residual: ResidualBanks | None,
        *,
        keep_decoded: bool = False,
        residual_added: bool = False,
    ) -> None:
        """Encode the bucket with error feedback.

        `residual_added`: gradient plus residual already lies in the residual's second bank, not in the flat buffer.
        `keep_decoded` also leaves the decoded values in the flat buffer. Codecs with error feedback compute them
        anyway.
        """
        before, after = (None, None) if residual is None else residual.before_and_after(*self.residual_range)
        values = in_buffer = self.values(flat_buffer)
        if residual_added and before is not None and after is not None:
            values = after[: len(in_buffer)]
            for gap in self.gaps:
                inside = slice((gap.start - self.start) // FLOAT_BYTES, (gap.stop - self.start) // FLOAT_BYTES)
                after[inside].copy_(before[inside])
        else:
            for gap in self.gaps:
                flat_buffer[gap].zero_()
        decoded = in_buffer if keep_decoded else None
        self.codec.encode(
            values, self.encoded_bytes(encoded_lane), residual_in=before, residual_out=after, decoded=decoded
        )

    def values(self, flat_buffer: Tensor) -> Tensor:
        return flat_buffer[self.start : self.stop].view(torch.float32)

    def encoded_bytes(self, encoded_lane: Tensor) -> Tensor:
        return encoded_lane[self.offset : self.offset + self.size_bytes]


class EncodedLayout:
    """The layout of a model's encoded lanes: first the buckets, then the tail, which is not encoded.

    A lane takes `lane_bytes` in memory, where each bucket begins at a multiple of 64. Without that padding,
    `sent_bytes` are sent; bucket i has arrived with byte `ends[i]`. SH110 if the gradients are not float32.

    A fragment passes the `params_by_bucket` of the whole model, so its gradients fall into the same buckets.
    """

    def __init__(
        self, layout: FlatLayout, settings: Mapping[str, Any], *, params_by_bucket: BucketParams | None = None
    ) -> None:
        self.layout = layout
        self.buckets: list[Bucket] = []
        self.residual_floats = 0
        scratch, offset = ScratchBuffers(), 0
        _check_dtypes(layout.grads)
        self._params_by_bucket = params_by_bucket or bucket_params(layout)
        for run in self._params_by_bucket:
            slots = [layout.grads[i] for i in run]
            start, stop = slots[0].start, align_up(slots[-1].start + slots[-1].size_bytes)
            codec = make_codec(settings, shapes=list(_shapes(slots)), scratch=scratch)
            count, size_bytes = (stop - start) // FLOAT_BYTES, codec.size_bytes((stop - start) // FLOAT_BYTES)
            residual_range = (self.residual_floats, self.residual_floats + codec.residual_floats(count))
            self.buckets.append(Bucket(codec, start, stop, offset, size_bytes, residual_range, list(_gaps(slots))))
            self.residual_floats = align_up(FLOAT_BYTES * residual_range[1]) // FLOAT_BYTES
            offset = align_up(offset + size_bytes)
        self.needs_residual, self.adds_residual = (
            self.buckets[0].codec.needs_residual,
            self.buckets[0].codec.adds_residual,
        )
        self.grads_bytes = self.buckets[-1].stop
        self.tail_offset = offset
        self.tail_bytes = layout.size_bytes - self.grads_bytes
        self.lane_bytes = align_up(offset + self.tail_bytes)
        self.ends = list(itertools.accumulate(bucket.size_bytes for bucket in self.buckets))
        self.sent_bytes = self.ends[-1] + self.tail_bytes
        ranges = [(bucket.start, bucket.size_bytes) for bucket in self.buckets]
        text = f"{layout.digest} {sorted(settings.items())} {ranges}"
        self.digest = int.from_bytes(hashlib.sha256(text.encode()).digest(), "little")

    @property
    def chunk_offsets(self) -> list[int]:
        """Boundaries of the chunks in the flat buffer: one chunk per bucket, the tail is the last."""
        return [0, *(bucket.stop for bucket in self.buckets), self.layout.size_bytes]

    def residual_views(self, bank: Tensor) -> list[Tensor]:
        """The residual of each gradient."""
        slots = {
            i: replace(slot, start=slot.start - bucket.start + FLOAT_BYTES * bucket.residual_range[0])
            for bucket, run in zip(self.buckets, self._params_by_bucket, strict=True)
            for i, slot in ((i, self.layout.grads[i]) for i in run)
        }
        return [slots[i].view_in(bank.view(torch.uint8)) for i in range(len(slots))]

    def encode(self, flat_buffer: Tensor, encoded_lane: Tensor, residual: ResidualBanks | None) -> None:
        """Encode a whole lane."""
        for bucket in self.buckets:
            bucket.encode(flat_buffer, encoded_lane, residual)
        self.write_tail(flat_buffer, encoded_lane)

    def payload(self, encoded_lane: memoryview) -> list[memoryview]:
        """The parts of an encoded lane that are sent, in order: one per bucket, and the tail."""
        ranges = [*((bucket.offset, bucket.size_bytes) for bucket in self.buckets), (self.tail_offset, self.tail_bytes)]
        return [encoded_lane[start : start + size] for start, size in ranges]

    def write_tail(self, flat_buffer: Tensor, encoded_lane: Tensor) -> None:
        self.tail(encoded_lane).copy_(flat_buffer[self.grads_bytes :])

    def tail(self, encoded_lane: Tensor) -> Tensor:
        return encoded_lane[self.tail_offset : self.tail_offset + self.tail_bytes]


class DecodeAndSum:
    """Decodes the encoded lanes bucket by bucket and sums them in the order of the tree into `out`."""

    def __init__(
        self,
        layout: EncodedLayout,
        encoded_lanes: Mapping[int, Tensor | None],
        out: Tensor,
        *,
        decoded: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """`encoded_lanes` has an entry for each lane; None stands for a lane without samples, and not all are None.
        `decoded`: one of the encoded lanes, and the buffer that already holds its decoded values."""

        def sum_tree(parts: Iterable[tuple[Node, Tensor | None]]) -> SumTree:
            tree = build_sum_tree(parts, len(encoded_lanes))
            assert tree is not None
            return tree

        self._layout = layout
        self._out = out
        self._decoded = decoded
        self._tree = sum_tree(((0, lane), encoded) for lane, encoded in encoded_lanes.items())
        tails = sum_tree(
            ((0, lane), None if encoded is None else layout.tail(encoded)) for lane, encoded in encoded_lanes.items()
        )
        regions = layout.layout.regions_within(layout.grads_bytes, layout.layout.size_bytes)
        self._tail_reduce = TreeReduce(tails, out[layout.grads_bytes :], regions)
        largest = max(bucket.stop - bucket.start for bucket in layout.buckets) // FLOAT_BYTES
        self._scratch = [torch.empty(largest) for _ in range(_scratch_depth(self._tree))]
        self._buckets_done = 0

    def restart(self) -> None:
        self._buckets_done = 0
        self._tail_reduce.restart()

    def run(self, until: int) -> None:
        """Sum the buckets that are complete once the first `until` sent bytes of every lane with samples are there."""
        layout = self._layout
        while self._buckets_done < len(layout.buckets) and layout.ends[self._buckets_done] <= until:
            bucket = layout.buckets[self._buckets_done]
            self._sum_into(self._tree, bucket, bucket.values(self._out), level=0)
            self._buckets_done += 1
        if until >= layout.sent_bytes:
            self._tail_reduce.run(layout.tail_bytes)

    def _sum_into(self, tree: SumTree, bucket: Bucket, out: Tensor, *, level: int) -> None:
        """The left subtree is summed in `out`, the right one in the scratch of this level unless it is a lane."""
        if isinstance(tree, Tensor):
            self._decode_into(tree, bucket, out, add=False)
            return
        left, right = tree
        self._sum_into(left, bucket, out, level=level)
        if isinstance(right, Tensor):
            self._decode_into(right, bucket, out, add=True)
        else:
            scratch = self._scratch[level][: out.numel()]
            self._sum_into(right, bucket, scratch, level=level + 1)
            out.add_(scratch)

    def _decode_into(self, encoded_lane: Tensor, bucket: Bucket, out: Tensor, *, add: bool) -> None:
        if self._decoded is None or encoded_lane is not self._decoded[0]:
            bucket.codec.decode(bucket.encoded_bytes(encoded_lane), out, add=add)
            return
        values = bucket.values(self._decoded[1])
        out.add_(values) if add else out.copy_(values)


def _check_dtypes(grads: Sequence[TensorSlot]) -> None:
    if other := next((slot.dtype for slot in grads if slot.dtype != torch.float32), None):
        kind = str(other).removeprefix("torch.")
        fix = "Use `codec: none`, or a model whose parameters are float32."
        raise error("SH110", f"codecs take float32 gradients, and some of these are {kind}", where="codec", fix=fix)


def bucket_params(layout: FlatLayout) -> list[list[int]]:
    """Indices of the gradients in each bucket: neighbours in memory, until a bucket is large enough."""
    slots, buckets = layout.grads, list[list[int]]()
    full = True
    for i in sorted(range(len(slots)), key=lambda i: (slots[i].start, slots[i].size_bytes)):
        if full:
            buckets.append([])
        buckets[-1].append(i)
        size_bytes = align_up(slots[i].start + slots[i].size_bytes) - slots[buckets[-1][0]].start
        full = size_bytes >= (FIRST_BUCKET_BYTES if len(buckets) == 1 else BUCKET_BYTES)
    return buckets


def _shapes(slots: Sequence[TensorSlot]) -> Iterator[Shape]:
    """The tensors' shapes in memory order, with the padding between them."""
    for slot in slots:
        order = sorted(range(len(slot.shape)), key=lambda d: (-slot.strides[d], d))
        yield tuple(slot.shape[d] for d in order)
        for gap in _gaps([slot]):
            yield ((gap.stop - gap.start) // FLOAT_BYTES,)


def _gaps(slots: Iterable[TensorSlot]) -> Iterator[slice]:
    """The padding behind tensors that do not end on an alignment boundary."""
    for slot in slots:
        end = slot.start + slot.size_bytes
        if align_up(end) > end:
            yield slice(end, align_up(end))


def _scratch_depth(tree: SumTree) -> int:
    """Number of scratch buffers in use at once."""
    if isinstance(tree, Tensor):
        return 0
    left, right = tree
    return max(_scratch_depth(left), 0 if isinstance(right, Tensor) else 1 + _scratch_depth(right))
