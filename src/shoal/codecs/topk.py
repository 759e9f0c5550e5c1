"""The k values of largest magnitude, and their indices."""

from __future__ import annotations

from math import ceil, sqrt

import torch
from torch import Tensor

from shoal.codecs.blockwise import pieces
from shoal.codecs.codec import ScratchBuffers, aligned_parts, check_decode, check_encode, shares_memory
from shoal.codecs.size import FLOAT_BYTES, topk_count

SAMPLES = 1 << 14
# The bits of a float32 without its sign. As integers they sort by magnitude, with NaN on top.
MAGNITUDE_MASK = 0x7FFFFFFF
WORD_VALUES = 8


class TopK:
    """Exactly the k values of largest magnitude; of equal magnitudes the first. k depends only on the number of values.

    A value that is not finite counts as the largest and is sent unchanged. Sent values leave no residual. With
    `momentum` the residual holds velocities, as in Deep Gradient Compression: the optimizer then needs no momentum.
    """

    exact = False
    needs_residual = True

    def __init__(self, keep: float, momentum: float | None, scratch: ScratchBuffers) -> None:
        self.adds_residual = not momentum
        self._keep = keep
        self._momentum = momentum
        self._scratch = scratch

    def size_bytes(self, count: int) -> int:
        return 2 * FLOAT_BYTES * topk_count(count, self._keep)

    def residual_floats(self, count: int) -> int:
        return 2 * count if self._momentum else count

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
        indices, picked = _indices_and_values(out)
        if not count:
            return
        candidates = values if residual_out is None else self._accumulate(values, residual_in, residual_out)
        chosen = topk_indices(candidates, len(indices), self._scratch)
        indices.copy_(chosen)
        torch.index_select(candidates, 0, chosen, out=picked)
        if residual_out is not None:
            for residual_row in residual_out.view(-1, count):
                residual_row.index_fill_(0, chosen, 0)
        if decoded is not None:
            self.decode(out, decoded)

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        check_decode(self, data, out)
        indices, picked = _indices_and_values(data)
        if not add:
            out.zero_()
        out.index_add_(0, indices, picked)

    # ---- a range of the values: the number of those that were sent, their indices, their values ----

    def cut(self, data: Tensor, count: int, start: int, stop: int) -> list[Tensor]:
        indices, picked = _indices_and_values(data)
        first, last = torch.searchsorted(indices, torch.tensor([start, stop], dtype=torch.int32)).tolist()
        head = torch.tensor([last - first], dtype=torch.int32)
        return [part.view(torch.uint8) for part in (head, indices[first:last], picked[first:last])]

    def max_cut_bytes(self, count: int, start: int, stop: int) -> int:
        return FLOAT_BYTES + 2 * FLOAT_BYTES * min(topk_count(count, self._keep), stop - start)

    def decode_cut(self, data: Tensor, count: int, start: int, stop: int, out: Tensor) -> int:
        sent = int(aligned_parts(data, FLOAT_BYTES).view(torch.int32))
        size_bytes = FLOAT_BYTES + 2 * FLOAT_BYTES * sent
        if not sent >= 0 or size_bytes > self.max_cut_bytes(count, start, stop):
            raise ValueError(f"{sent} of {stop - start} values")
        indices, picked = _indices_and_values(aligned_parts(data, size_bytes)[FLOAT_BYTES:])
        indices = indices - start
        if sent and (int(indices[0]) < 0 or int(indices[-1]) >= stop - start or bool((indices.diff() <= 0).any())):
            raise ValueError("indices of other values, or unsorted indices")
        out.zero_().index_add_(0, indices, picked)
        return size_bytes

    def _accumulate(self, values: Tensor, residual_in: Tensor | None, residual_out: Tensor) -> Tensor:
        """The residual plus these values; with momentum, the updated velocities follow."""
        count = values.numel()
        if shares_memory(values, residual_out):
            return values
        if residual_in is None:
            residual_out.view(-1, count).copy_(values)
        elif not self._momentum:
            torch.add(values, residual_in, out=residual_out)
        else:
            velocity = torch.mul(residual_in[count:], self._momentum, out=residual_out[count:]).add_(values)
            torch.add(residual_in[:count], velocity, out=residual_out[:count])
        return residual_out[:count]


def topk_indices(values: Tensor, k: int, scratch: ScratchBuffers) -> Tensor:
    """Indices of the k values of largest magnitude, in rising order; of equal magnitudes the first.

    A sample estimates the magnitude that about k values reach. The estimate affects the time, never the result: the k
    largest are picked among all values that reach it, and if fewer than k do, a lower magnitude is tried.
    """
    stride = max(1, values.numel() // SAMPLES) | 1
    sample = values[::stride].view(torch.int32) & MAGNITUDE_MASK
    rank = k if stride == 1 else _safe_sample_rank(k / stride)
    while True:
        limit = 1 if rank > len(sample) else max(1, int(sample.kthvalue(len(sample) - rank + 1).values))
        found = _indices_at_least(values, limit, scratch)
        if len(found) >= k:
            return _first_k(found, values, k)
        if limit == 1:
            return _fill_with_zeros(found, values, k)
        rank *= 4


def _safe_sample_rank(expected: float) -> int:
    """An upper bound, rarely exceeded, for the number of top values in a sample that should hold `expected`."""
    return ceil(expected + 4 * sqrt(expected) + 4)


def _indices_at_least(values: Tensor, limit: int, scratch: ScratchBuffers) -> Tensor:
    """Indices of the magnitudes of at least `limit` (above 0). Tests words of eight first, since most hold none."""
    device, where, which = values.device, list[Tensor](), list[Tensor]()
    for start, stop in pieces(values.numel(), WORD_VALUES, device):
        count = stop - start
        sizes = scratch.get("sizes", count, torch.int32, device)
        torch.bitwise_and(values[start:stop].view(torch.int32), MAGNITUDE_MASK, out=sizes)
        sizes.neg_().add_(limit - 1).bitwise_right_shift_(31)  # -1 where the limit is reached, else 0
        words = scratch.get("words", -(-count // WORD_VALUES), torch.int64, device)
        words[-1] = 0  # behind the last value
        words.view(torch.int8)[:count].copy_(sizes)
        some = words.nonzero().view(-1)
        which.append(words.index_select(0, some))
        where.append(some.add_(start // WORD_VALUES))
    within = torch.cat(which).view(torch.int8).nonzero().view(-1)
    return torch.cat(where).index_select(0, within >> 3).mul_(WORD_VALUES).add_(within & 7)


def _first_k(found: Tensor, values: Tensor, k: int) -> Tensor:
    sizes = values.index_select(0, found).view(torch.int32).bitwise_and_(MAGNITUDE_MASK)
    last = sizes.kthvalue(len(sizes) - k + 1).values
    above, equal = sizes > last, sizes == last
    needed = k - above.sum()
    return found[above | (equal & (equal.cumsum(0) <= needed))]


def _fill_with_zeros(found: Tensor, values: Tensor, k: int) -> Tensor:
    """All nonzero values and the first zeros. Fewer than k are nonzero, so the first k values hold enough zeros."""
    zeros = (values[:k] == 0).nonzero().view(-1)[: k - len(found)]
    return torch.cat([found, zeros]).sort().values


def _indices_and_values(data: Tensor) -> tuple[Tensor, Tensor]:
    half = data.numel() // 2
    return data[:half].view(torch.int32), data[half:].view(torch.float32)
