"""Sums of lanes in memory that a successor on the same host reads, instead of having them sent."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shoal.parallel.flat import Layout
from shoal.parallel.links.memory import Arena, Memory, look_into
from shoal.parallel.server.post import Post

_COUNT_BYTES = 8
_MASK = (1 << 32) - 1


@dataclass(frozen=True)
class SharedSums:
    """A stretch, and behind it a count for each chunk, which changes before other sums come to lie there."""

    memory: Memory
    fd: int
    _counts: npt.NDArray[np.int64]

    @classmethod
    def own(cls, layout: Layout) -> SharedSums:
        arena = Arena(_size_bytes(layout))
        return cls._in(arena.memory, layout, arena.fd)

    @classmethod
    def of_another(cls, fd: int, layout: Layout) -> SharedSums:
        """For reading; `fd` is closed. LinkError if it is not such memory."""
        return cls._in(look_into(fd, _size_bytes(layout)), layout, -1)

    @classmethod
    def _in(cls, whole: Memory, layout: Layout, fd: int) -> SharedSums:
        end = layout.size_bytes
        return cls(whole.part(0, end), fd, np.frombuffer(whole.raw[end:], dtype=np.int64))

    def begin(self, post: Post) -> None:
        """From now on other sums will lie in the piece."""
        self._counts[post.piece.first : post.piece.last] += 1

    def count(self, post: Post) -> int:
        """Another one when other sums lie in any part of the piece, or begin to."""
        return int(self._counts[post.piece.first : post.piece.last].sum()) & _MASK


def _size_bytes(layout: Layout) -> int:
    return layout.size_bytes + _COUNT_BYTES * (len(layout.cuts) - 1)
