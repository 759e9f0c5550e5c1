"""The few largest values, and where they were."""

from __future__ import annotations

from math import ceil, sqrt

import torch
from torch import Tensor

from shoal.codecs.codec import check_decode, check_encode, summed
from shoal.codecs.piecewise import pieces
from shoal.codecs.scratch import Scratch
from shoal.codecs.size import FLOAT, kept

SAMPLES = 1 << 14
SIZE = 0x7FFFFFFF  # a float32's bits without its sign; as whole numbers they have the order of sizes, NaN on top
WORD = 8


class TopK:
    """Exactly the k largest by size, of equal ones the first; k follows from the number of values.

    A value that is not finite counts as the largest and is sent as it is, and what is sent is not remembered.
    With `momentum`, what is remembered are velocities, as in Deep Gradient Compression: the optimizer then needs none.
    """

    exact = False
    remembers = True

    def __init__(self, keep: float, momentum: float | None, scratch: Scratch) -> None:
        self.adds = not momentum
        self._keep = keep
        self._momentum = momentum
        self._scratch = scratch

    def size_bytes(self, count: int) -> int:
        return 2 * FLOAT * kept(count, self._keep)

    def memory_floats(self, count: int) -> int:
        return 2 * count if self._momentum else count

    def encode(
        self,
        values: Tensor,
        out: Tensor,
        *,
        before: Tensor | None = None,
        after: Tensor | None = None,
        back: Tensor | None = None,
    ) -> None:
        count = check_encode(self, values, out, before, after, back)
        places, sizes = _split(out)
        if not count:
            return
        candidates = values if after is None else self._accumulate(values, before, after)
        chosen = largest(candidates, len(places), self._scratch)
        places.copy_(chosen)
        torch.index_select(candidates, 0, chosen, out=sizes)
        if after is not None:
            for remembered in after.view(-1, count):
                remembered.index_fill_(0, chosen, 0)
        if back is not None:
            self.decode(out, back)

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        check_decode(self, data, out)
        places, sizes = _split(data)
        if not add:
            out.zero_()
        out.index_add_(0, places, sizes)

    def _accumulate(self, values: Tensor, before: Tensor | None, after: Tensor) -> Tensor:
        """What was not sent so far, with these values; then, with momentum, the velocities."""
        count = values.numel()
        if summed(values, after):
            return values
        if before is None:
            after.view(-1, count).copy_(values)
        elif not self._momentum:
            torch.add(values, before, out=after)
        else:
            velocity = torch.mul(before[count:], self._momentum, out=after[count:]).add_(values)
            torch.add(before[:count], velocity, out=after[:count])
        return after[:count]


def largest(values: Tensor, k: int, scratch: Scratch) -> Tensor:
    """Where the k largest by size are, in rising order; of equal ones the first count.

    A sample tells which size about so many exceed. It decides how long this takes, and never the outcome: from all
    that reach that size the k largest are picked, and where too few do, a lower size is tried.
    """
    stride = max(1, values.numel() // SAMPLES) | 1
    sample = values[::stride].view(torch.int32) & SIZE
    rank = k if stride == 1 else _careful(k / stride)
    while True:
        limit = 1 if rank > len(sample) else max(1, int(sample.kthvalue(len(sample) - rank + 1).values))
        found = _reaching(values, limit, scratch)
        if len(found) >= k:
            return _first_of(found, values, k)
        if limit == 1:
            return _with_zeros(found, values, k)
        rank *= 4


def _careful(expected: float) -> int:
    """Of a sample that should hold so many of the largest, a number that it hardly ever holds more of."""
    return ceil(expected + 4 * sqrt(expected) + 4)


def _reaching(values: Tensor, limit: int, scratch: Scratch) -> Tensor:
    """Where the sizes are at least `limit`, which is above 0. Words of eight are looked at first: most hold none."""
    device, where, which = values.device, list[Tensor](), list[Tensor]()
    for start, stop in pieces(values.numel(), WORD, device):
        count = stop - start
        sizes = scratch.take("sizes", count, torch.int32, device)
        torch.bitwise_and(values[start:stop].view(torch.int32), SIZE, out=sizes)
        sizes.neg_().add_(limit - 1).bitwise_right_shift_(31)  # -1 where it is reached, else 0
        words = scratch.take("words", -(-count // WORD), torch.int64, device)
        words[-1] = 0  # behind the last value
        words.view(torch.int8)[:count].copy_(sizes)
        some = words.nonzero().view(-1)
        which.append(words.index_select(0, some))
        where.append(some.add_(start // WORD))
    within = torch.cat(which).view(torch.int8).nonzero().view(-1)
    return torch.cat(where).index_select(0, within >> 3).mul_(WORD).add_(within & 7)


def _first_of(found: Tensor, values: Tensor, k: int) -> Tensor:
    sizes = values.index_select(0, found).view(torch.int32).bitwise_and_(SIZE)
    last = sizes.kthvalue(len(sizes) - k + 1).values
    above, equal = sizes > last, sizes == last
    needed = k - above.sum()
    return found[above | (equal & (equal.cumsum(0) <= needed))]


def _with_zeros(found: Tensor, values: Tensor, k: int) -> Tensor:
    """All that are not zero, and the first zeros. Fewer than k are not, so there are enough among the first k."""
    zeros = (values[:k] == 0).nonzero().view(-1)[: k - len(found)]
    return torch.cat([found, zeros]).sort().values


def _split(data: Tensor) -> tuple[Tensor, Tensor]:
    half = data.numel() // 2
    return data[:half].view(torch.int32), data[half:].view(torch.float32)
