"""A lane's gradients as a codec sees them: cut into runs of whole tensors, each encoded by itself.

A cut can leave as soon as backward has finished its tensors, while the next is in the making. Where the cuts are
follows from the model alone, so that everybody means the same. What is not a gradient goes as it is, behind them.
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

BUCKET_BYTES = 2 << 20  # measured: with half of it top-k takes a third longer, with more of it less leaves early
FIRST_BUCKET_BYTES = 1 << 19  # nothing is on the wire before it
BucketParams = Sequence[Sequence[int]]


class ResidualBanks(Protocol):
    """A lane's, or of a fragment of it."""

    def before_and_after(self, start: int, stop: int) -> tuple[Tensor | None, Tensor]: ...


@dataclass(frozen=True)
class Bucket:
    """The bytes [start, stop) of the stretch become `size_bytes` that lie `at` a place in a lane's slot. The lane
    remembers what lies between `remembered` of its memory. `gaps` of the stretch hold nothing, and are encoded too."""

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
        """What is in the stretch or, if it is `summed`, in the memory, with what it remembered. To `keep` what will be
        decoded in the stretch is nearly free for who remembers what was lost."""
        before, after = (None, None) if residual is None else residual.before_and_after(*self.residual_range)
        values = there = self.values(flat_buffer)
        if residual_added and before is not None and after is not None:
            values = after[: len(there)]
            for gap in self.gaps:
                inside = slice((gap.start - self.start) // FLOAT_BYTES, (gap.stop - self.start) // FLOAT_BYTES)
                after[inside].copy_(before[inside])
        else:
            for gap in self.gaps:
                flat_buffer[gap].zero_()
        back = there if keep_decoded else None
        self.codec.encode(
            values, self.encoded_bytes(encoded_lane), residual_in=before, residual_out=after, decoded=back
        )

    def values(self, flat_buffer: Tensor) -> Tensor:
        return flat_buffer[self.start : self.stop].view(torch.float32)

    def encoded_bytes(self, encoded_lane: Tensor) -> Tensor:
        return encoded_lane[self.offset : self.offset + self.size_bytes]


class EncodedLayout:
    """What encoded lanes of a model look like: first the cuts, then the tail, which is not encoded.

    A lane takes `slot_bytes` in memory, where all begins at multiples of 64; without the gaps, `sent_bytes` of them are
    sent, and a cut is there with the byte where it `ends`. SH110 if the gradients are not float32.

    A fragment's gradients are cut as they are in the whole: in these `cut_as`.
    """

    def __init__(
        self, layout: FlatLayout, settings: Mapping[str, Any], *, params_by_bucket: BucketParams | None = None
    ) -> None:
        self.layout = layout
        self.buckets: list[Bucket] = []
        self.residual_floats = 0
        scratch, place = ScratchBuffers(), 0
        _check_dtypes(layout.grads)
        self._params_by_bucket = params_by_bucket or bucket_params(layout)
        for run in self._params_by_bucket:
            places = [layout.grads[i] for i in run]
            start, stop = places[0].start, align_up(places[-1].start + places[-1].size_bytes)
            codec = make_codec(settings, shapes=list(_shapes(places)), scratch=scratch)
            count, size_bytes = (stop - start) // FLOAT_BYTES, codec.size_bytes((stop - start) // FLOAT_BYTES)
            kept = (self.residual_floats, self.residual_floats + codec.residual_floats(count))
            self.buckets.append(Bucket(codec, start, stop, place, size_bytes, kept, list(_gaps(places))))
            self.residual_floats = align_up(FLOAT_BYTES * kept[1]) // FLOAT_BYTES
            place = align_up(place + size_bytes)
        self.needs_residual, self.adds_residual = (
            self.buckets[0].codec.needs_residual,
            self.buckets[0].codec.adds_residual,
        )
        self.grads_bytes = self.buckets[-1].stop
        self.tail_offset = place
        self.tail_bytes = layout.size_bytes - self.grads_bytes
        self.lane_bytes = align_up(place + self.tail_bytes)
        self.ends = list(itertools.accumulate(cut.size_bytes for cut in self.buckets))
        self.sent_bytes = self.ends[-1] + self.tail_bytes
        text = f"{layout.digest} {sorted(settings.items())} {[(cut.start, cut.size_bytes) for cut in self.buckets]}"
        self.digest = int.from_bytes(hashlib.sha256(text.encode()).digest(), "little")

    @property
    def chunk_offsets(self) -> list[int]:
        """Where the stretch is cut if every cut is a chunk, and the tail the last."""
        return [0, *(cut.stop for cut in self.buckets), self.layout.size_bytes]

    def residual_views(self, bank: Tensor) -> list[Tensor]:
        """What was lost of each gradient."""
        places = {
            i: replace(place, start=place.start - cut.start + FLOAT_BYTES * cut.residual_range[0])
            for cut, run in zip(self.buckets, self._params_by_bucket, strict=True)
            for i, place in ((i, self.layout.grads[i]) for i in run)
        }
        return [places[i].view_in(bank.view(torch.uint8)) for i in range(len(places))]

    def chunk_range(self, chunk: int) -> tuple[int, int]:
        """Where a chunk lies in a slot, and how long it is."""
        if chunk == len(self.buckets):
            return self.tail_offset, self.tail_bytes
        return self.buckets[chunk].offset, self.buckets[chunk].size_bytes

    def encode(self, flat_buffer: Tensor, encoded_lane: Tensor, residual: ResidualBanks | None) -> None:
        """A whole lane."""
        for cut in self.buckets:
            cut.encode(flat_buffer, encoded_lane, residual)
        self.write_tail(flat_buffer, encoded_lane)

    def decode(self, chunk: int, data: Tensor, flat_buffer: Tensor) -> None:
        """What came of one chunk, into its place."""
        if chunk == len(self.buckets):
            flat_buffer[self.grads_bytes :].copy_(data)
        else:
            self.buckets[chunk].codec.decode(data, self.buckets[chunk].values(flat_buffer))

    def payload(self, encoded_lane: memoryview) -> list[memoryview]:
        """What of a slot is sent, in order: one part per cut, and the tail."""
        places = [*((cut.offset, cut.size_bytes) for cut in self.buckets), (self.tail_offset, self.tail_bytes)]
        return [encoded_lane[start : start + size] for start, size in places]

    def write_tail(self, flat_buffer: Tensor, encoded_lane: Tensor) -> None:
        self.tail(encoded_lane).copy_(flat_buffer[self.grads_bytes :])

    def tail(self, encoded_lane: Tensor) -> Tensor:
        return encoded_lane[self.tail_offset : self.tail_offset + self.tail_bytes]


class DecodeAndSum:
    """Decodes the lanes' slots cut by cut and adds them up in the order of the tree, into the stretch `out`."""

    def __init__(
        self,
        layout: EncodedLayout,
        encoded_lanes: Mapping[int, Tensor | None],
        out: Tensor,
        *,
        decoded: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """`slots` are those of all lanes; of some at least there is one. `kept`: one of them, and the stretch where
        what it decodes to lies already."""

        def term(parts: Iterable[tuple[Node, Tensor | None]]) -> SumTree:
            found = build_sum_tree(parts, len(encoded_lanes))
            assert found is not None
            return found

        self._layout = layout
        self._out = out
        self._decoded = decoded
        self._tree = term(((0, lane), slot) for lane, slot in encoded_lanes.items())
        tails = term(((0, lane), None if slot is None else layout.tail(slot)) for lane, slot in encoded_lanes.items())
        regions = layout.layout.regions_within(layout.grads_bytes, layout.layout.size_bytes)
        self._tail_reduce = TreeReduce(tails, out[layout.grads_bytes :], regions)
        largest = max(cut.stop - cut.start for cut in layout.buckets) // FLOAT_BYTES
        self._scratch = [torch.empty(largest) for _ in range(_scratch_depth(self._tree))]
        self._buckets_done = 0

    def restart(self) -> None:
        self._buckets_done = 0
        self._tail_reduce.restart()

    def run(self, until: int) -> None:
        """As far as the first `until` bytes of what is sent of a lane allow, of every lane that has samples."""
        form = self._layout
        while self._buckets_done < len(form.buckets) and form.ends[self._buckets_done] <= until:
            cut = form.buckets[self._buckets_done]
            self._sum_into(self._tree, cut, cut.values(self._out), level=0)
            self._buckets_done += 1
        if until >= form.sent_bytes:
            self._tail_reduce.run(form.tail_bytes)

    def _sum_into(self, tree: SumTree, bucket: Bucket, out: Tensor, *, level: int) -> None:
        """Left is added up in `out` itself, right in the room of this level unless it is a lane."""
        if isinstance(tree, Tensor):
            self._decode_into(tree, bucket, out, add=False)
            return
        left, right = tree
        self._sum_into(left, bucket, out, level=level)
        if isinstance(right, Tensor):
            self._decode_into(right, bucket, out, add=True)
        else:
            room = self._scratch[level][: out.numel()]
            self._sum_into(right, bucket, room, level=level + 1)
            out.add_(room)

    def _decode_into(self, encoded_lane: Tensor, bucket: Bucket, out: Tensor, *, add: bool) -> None:
        if self._decoded is None or encoded_lane is not self._decoded[0]:
            bucket.codec.decode(bucket.encoded_bytes(encoded_lane), out, add=add)
            return
        values = bucket.values(self._decoded[1])
        out.add_(values) if add else out.copy_(values)


def _check_dtypes(grads: Sequence[TensorSlot]) -> None:
    if other := next((place.dtype for place in grads if place.dtype != torch.float32), None):
        kind = str(other).removeprefix("torch.")
        fix = "Use `codec: none`, or a model whose parameters are float32."
        raise error("SH110", f"codecs take float32 gradients, and some of these are {kind}", where="codec", fix=fix)


def bucket_params(layout: FlatLayout) -> list[list[int]]:
    """Numbers of the gradients, as they lie: neighbours, until there is enough to be worth sending."""
    places, found = layout.grads, list[list[int]]()
    done = True
    for i in sorted(range(len(places)), key=lambda i: (places[i].start, places[i].size_bytes)):
        if done:
            found.append([])
        found[-1].append(i)
        size_bytes = align_up(places[i].start + places[i].size_bytes) - places[found[-1][0]].start
        done = size_bytes >= (FIRST_BUCKET_BYTES if len(found) == 1 else BUCKET_BYTES)
    return found


def _shapes(slots: Sequence[TensorSlot]) -> Iterator[Shape]:
    """As they lie in memory, with the gaps between them."""
    for place in slots:
        order = sorted(range(len(place.shape)), key=lambda d: (-place.strides[d], d))
        yield tuple(place.shape[d] for d in order)
        for gap in _gaps([place]):
            yield ((gap.stop - gap.start) // FLOAT_BYTES,)


def _gaps(slots: Iterable[TensorSlot]) -> Iterator[slice]:
    """Behind tensors that do not end where another may begin."""
    for place in slots:
        end = place.start + place.size_bytes
        if align_up(end) > end:
            yield slice(end, align_up(end))


def _scratch_depth(tree: SumTree) -> int:
    """How many rooms are in use at once."""
    if isinstance(tree, Tensor):
        return 0
    left, right = tree
    return max(_scratch_depth(left), 0 if isinstance(right, Tensor) else 1 + _scratch_depth(right))
