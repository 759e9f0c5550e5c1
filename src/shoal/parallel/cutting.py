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

from shoal.codecs.codec import Codec
from shoal.codecs.make import make
from shoal.codecs.scratch import Scratch
from shoal.codecs.size import FLOAT, Shape
from shoal.errors import error
from shoal.parallel.adding import Addition, Term, term_of
from shoal.parallel.flat import Layout, Place, aligned
from shoal.parallel.tree import Node

CUT_BYTES = 2 << 20  # measured: with half of it top-k takes a third longer, with more of it less leaves early
FIRST_BYTES = 1 << 19  # nothing is on the wire before it
Runs = Sequence[Sequence[int]]


class Remembered(Protocol):
    """A lane's, or of a fragment of it."""

    def part(self, start: int, stop: int) -> tuple[Tensor | None, Tensor]: ...


@dataclass(frozen=True)
class Cut:
    """The bytes [start, stop) of the stretch become `size_bytes` that lie `at` a place in a lane's slot. The lane
    remembers what lies between `remembered` of its memory. `gaps` of the stretch hold nothing, and are encoded too."""

    codec: Codec
    start: int
    stop: int
    at: int
    size_bytes: int
    remembered: tuple[int, int]
    gaps: Sequence[slice]

    def encode(
        self, stretch: Tensor, slot: Tensor, memory: Remembered | None, *, keep: bool = False, summed: bool = False
    ) -> None:
        """What is in the stretch or, if it is `summed`, in the memory, with what it remembered. To `keep` what will be
        decoded in the stretch is nearly free for who remembers what was lost."""
        before, after = (None, None) if memory is None else memory.part(*self.remembered)
        values = there = self.values(stretch)
        if summed and before is not None and after is not None:
            values = after[: len(there)]
            for gap in self.gaps:
                inside = slice((gap.start - self.start) // FLOAT, (gap.stop - self.start) // FLOAT)
                after[inside].copy_(before[inside])
        else:
            for gap in self.gaps:
                stretch[gap].zero_()
        back = there if keep else None
        self.codec.encode(values, self.encoded(slot), before=before, after=after, back=back)

    def values(self, stretch: Tensor) -> Tensor:
        return stretch[self.start : self.stop].view(torch.float32)

    def encoded(self, slot: Tensor) -> Tensor:
        return slot[self.at : self.at + self.size_bytes]


class Form:
    """What encoded lanes of a model look like: first the cuts, then the tail, which is not encoded.

    A lane takes `slot_bytes` in memory, where all begins at multiples of 64; without the gaps, `sent_bytes` of them are
    sent, and a cut is there with the byte where it `ends`. SH110 if the gradients are not float32.

    A fragment's gradients are cut as they are in the whole: in these `cut_as`.
    """

    def __init__(self, layout: Layout, settings: Mapping[str, Any], *, cut_as: Runs | None = None) -> None:
        self.layout = layout
        self.cuts: list[Cut] = []
        self.memory_floats = 0
        scratch, place = Scratch(), 0
        _check(layout.grads)
        self._runs = cut_as or runs(layout)
        for run in self._runs:
            places = [layout.grads[i] for i in run]
            start, stop = places[0].start, aligned(places[-1].start + places[-1].size_bytes)
            codec = make(settings, shapes=list(_shapes(places)), scratch=scratch)
            count, size_bytes = (stop - start) // FLOAT, codec.size_bytes((stop - start) // FLOAT)
            kept = (self.memory_floats, self.memory_floats + codec.memory_floats(count))
            self.cuts.append(Cut(codec, start, stop, place, size_bytes, kept, list(_gaps(places))))
            self.memory_floats = aligned(FLOAT * kept[1]) // FLOAT
            place = aligned(place + size_bytes)
        self.remembers, self.adds = self.cuts[0].codec.remembers, self.cuts[0].codec.adds
        self.grads_bytes = self.cuts[-1].stop
        self.tail_at = place
        self.tail_bytes = layout.size_bytes - self.grads_bytes
        self.slot_bytes = aligned(place + self.tail_bytes)
        self.ends = list(itertools.accumulate(cut.size_bytes for cut in self.cuts))
        self.sent_bytes = self.ends[-1] + self.tail_bytes
        text = f"{layout.digest} {sorted(settings.items())} {[(cut.start, cut.size_bytes) for cut in self.cuts]}"
        self.digest = int.from_bytes(hashlib.sha256(text.encode()).digest(), "little")

    @property
    def chunks(self) -> list[int]:
        """Where the stretch is cut if every cut is a chunk, and the tail the last."""
        return [0, *(cut.stop for cut in self.cuts), self.layout.size_bytes]

    def remembered(self, memory: Tensor) -> list[Tensor]:
        """What was lost of each gradient."""
        places = {
            i: replace(place, start=place.start - cut.start + FLOAT * cut.remembered[0])
            for cut, run in zip(self.cuts, self._runs, strict=True)
            for i, place in ((i, self.layout.grads[i]) for i in run)
        }
        return [places[i].of(memory.view(torch.uint8)) for i in range(len(places))]

    def part(self, chunk: int) -> tuple[int, int]:
        """Where a chunk lies in a slot, and how long it is."""
        if chunk == len(self.cuts):
            return self.tail_at, self.tail_bytes
        return self.cuts[chunk].at, self.cuts[chunk].size_bytes

    def encode(self, stretch: Tensor, slot: Tensor, memory: Remembered | None) -> None:
        """A whole lane."""
        for cut in self.cuts:
            cut.encode(stretch, slot, memory)
        self.lay_down_tail(stretch, slot)

    def decode(self, chunk: int, data: Tensor, stretch: Tensor) -> None:
        """What came of one chunk, into its place."""
        if chunk == len(self.cuts):
            stretch[self.grads_bytes :].copy_(data)
        else:
            self.cuts[chunk].codec.decode(data, self.cuts[chunk].values(stretch))

    def sent(self, slot: memoryview) -> list[memoryview]:
        """What of a slot is sent, in order: one part per cut, and the tail."""
        places = [*((cut.at, cut.size_bytes) for cut in self.cuts), (self.tail_at, self.tail_bytes)]
        return [slot[start : start + size] for start, size in places]

    def lay_down_tail(self, stretch: Tensor, slot: Tensor) -> None:
        self.tail(slot).copy_(stretch[self.grads_bytes :])

    def tail(self, slot: Tensor) -> Tensor:
        return slot[self.tail_at : self.tail_at + self.tail_bytes]


class Summing:
    """Decodes the lanes' slots cut by cut and adds them up in the order of the tree, into the stretch `out`."""

    def __init__(
        self,
        form: Form,
        slots: Mapping[int, Tensor | None],
        out: Tensor,
        *,
        kept: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """`slots` are those of all lanes; of some at least there is one. `kept`: one of them, and the stretch where
        what it decodes to lies already."""

        def term(parts: Iterable[tuple[Node, Tensor | None]]) -> Term:
            found = term_of(parts, len(slots))
            assert found is not None
            return found

        self._form = form
        self._out = out
        self._kept = kept
        self._term = term(((0, lane), slot) for lane, slot in slots.items())
        tails = term(((0, lane), None if slot is None else form.tail(slot)) for lane, slot in slots.items())
        regions = form.layout.within(form.grads_bytes, form.layout.size_bytes)
        self._tails = Addition(tails, out[form.grads_bytes :], regions)
        largest = max(cut.stop - cut.start for cut in form.cuts) // FLOAT
        self._rooms = [torch.empty(largest) for _ in range(_depth(self._term))]
        self._done = 0

    def restart(self) -> None:
        self._done = 0
        self._tails.restart()

    def run(self, until: int) -> None:
        """As far as the first `until` bytes of what is sent of a lane allow, of every lane that has samples."""
        form = self._form
        while self._done < len(form.cuts) and form.ends[self._done] <= until:
            cut = form.cuts[self._done]
            self._put(self._term, cut, cut.values(self._out), level=0)
            self._done += 1
        if until >= form.sent_bytes:
            self._tails.run(form.tail_bytes)

    def _put(self, term: Term, cut: Cut, out: Tensor, *, level: int) -> None:
        """Left is added up in `out` itself, right in the room of this level unless it is a lane."""
        if isinstance(term, Tensor):
            self._take(term, cut, out, add=False)
            return
        left, right = term
        self._put(left, cut, out, level=level)
        if isinstance(right, Tensor):
            self._take(right, cut, out, add=True)
        else:
            room = self._rooms[level][: out.numel()]
            self._put(right, cut, room, level=level + 1)
            out.add_(room)

    def _take(self, slot: Tensor, cut: Cut, out: Tensor, *, add: bool) -> None:
        if self._kept is None or slot is not self._kept[0]:
            cut.codec.decode(cut.encoded(slot), out, add=add)
            return
        values = cut.values(self._kept[1])
        out.add_(values) if add else out.copy_(values)


def _check(grads: Sequence[Place]) -> None:
    if other := next((place.dtype for place in grads if place.dtype != torch.float32), None):
        kind = str(other).removeprefix("torch.")
        fix = "Use `codec: none`, or a model whose parameters are float32."
        raise error("SH110", f"codecs take float32 gradients, and some of these are {kind}", where="codec", fix=fix)


def runs(layout: Layout) -> list[list[int]]:
    """Numbers of the gradients, as they lie: neighbours, until there is enough to be worth sending."""
    places, found = layout.grads, list[list[int]]()
    done = True
    for i in sorted(range(len(places)), key=lambda i: (places[i].start, places[i].size_bytes)):
        if done:
            found.append([])
        found[-1].append(i)
        size_bytes = aligned(places[i].start + places[i].size_bytes) - places[found[-1][0]].start
        done = size_bytes >= (FIRST_BYTES if len(found) == 1 else CUT_BYTES)
    return found


def _shapes(places: Sequence[Place]) -> Iterator[Shape]:
    """As they lie in memory, with the gaps between them."""
    for place in places:
        order = sorted(range(len(place.shape)), key=lambda d: (-place.strides[d], d))
        yield tuple(place.shape[d] for d in order)
        for gap in _gaps([place]):
            yield ((gap.stop - gap.start) // FLOAT,)


def _gaps(places: Iterable[Place]) -> Iterator[slice]:
    """Behind tensors that do not end where another may begin."""
    for place in places:
        end = place.start + place.size_bytes
        if aligned(end) > end:
            yield slice(end, aligned(end))


def _depth(term: Term) -> int:
    """How many rooms are in use at once."""
    if isinstance(term, Tensor):
        return 0
    left, right = term
    return max(_depth(left), 0 if isinstance(right, Tensor) else 1 + _depth(right))
