"""Finish the tree over stretches of memory: what each worker has of it, added in the order of the tree.

The order is found once, and kept as a list of additions; running it allocates nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shoal.parallel.flat import Region
from shoal.parallel.tree import Node, TreeSum

CHUNK_BYTES = 256 * 1024  # several of them stay in a core's cache
Term = Tensor | tuple["Term", "Term"]


def term_of(partials: Iterable[tuple[Node, Tensor | None]], lanes: int) -> Term | None:
    """What is to be added, in the shape of the tree; None if there is nothing."""
    tree: TreeSum[Term] = TreeSum(lanes, lambda left, right: (left, right))
    for node, value in partials:
        tree.push(node, value)
    return tree.total()


class Addition:
    """Puts the sum of a term's stretches into `out`. `regions` says what the stretches hold.

    It goes from front to back and can be done in parts, as far as the stretches have arrived.
    """

    def __init__(self, term: Term, out: Tensor, regions: Sequence[Region]) -> None:
        self._ends: list[int] = []
        self._acts: list[list[tuple[Tensor, Tensor | None, Tensor]]] = []
        self._done = 0
        self._scratch = torch.empty(_depth(term) * CHUNK_BYTES, dtype=torch.uint8)
        for region in regions:
            shape = term if region.added else _lowest(term)
            for piece in _chunks(region):
                self._acts.append([])
                self._ends.append(piece.stop)
                there = piece.of(out)
                value = self._plan(shape, there, piece, level=0)
                if value is not there:
                    self._acts[-1].append((value, None, there))

    def _plan(self, term: Term, out: Tensor, piece: Region, *, level: int) -> Tensor:
        """Left is added up in `out` itself, right in the scratch of this level; what stays on the right of it goes
        one level deeper."""
        if isinstance(term, Tensor):
            return piece.of(term)
        left = self._plan(term[0], out, piece, level=level)
        start = level * CHUNK_BYTES
        room = self._scratch[start : start + piece.stop - piece.start].view(piece.dtype)
        right = self._plan(term[1], room, piece, level=level + 1)
        self._acts[-1].append((left, right, out))
        return out

    def restart(self) -> None:
        self._done = 0

    def run(self, until: int) -> None:
        """As far as the first `until` bytes allow."""
        while self._done < len(self._ends) and self._ends[self._done] <= until:
            for left, right, out in self._acts[self._done]:
                if right is None:
                    out.copy_(left)
                else:
                    torch.add(left, right, out=out)
            self._done += 1


def _chunks(region: Region) -> list[Region]:
    starts = range(region.start, region.stop, CHUNK_BYTES)
    return [Region(region.dtype, region.added, a, min(a + CHUNK_BYTES, region.stop)) for a in starts]


def _lowest(term: Term) -> Tensor:
    return term if isinstance(term, Tensor) else _lowest(term[0])


def _depth(term: Term) -> int:
    """How many scratches are in use at once."""
    return 0 if isinstance(term, Tensor) else max(_depth(term[0]), 1 + _depth(term[1]))
