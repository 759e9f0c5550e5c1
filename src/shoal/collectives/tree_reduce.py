"""Finish the reduction tree over flat buffers: the workers' partial sums, added in the order of the tree.

The order is computed once and kept as a list of additions; running it allocates nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shoal.lanes.flat_layout import DtypeRegion
from shoal.lanes.reduction_tree import Node, TreeSum

CHUNK_BYTES = 256 * 1024  # several chunks fit into a core's cache
SumTree = Tensor | tuple["SumTree", "SumTree"]


def build_sum_tree(partials: Iterable[tuple[Node, Tensor | None]], lanes: int) -> SumTree | None:
    """The partial sums in the shape of the tree; None if all are empty."""
    tree: TreeSum[SumTree] = TreeSum(lanes, lambda left, right: (left, right))
    for node, value in partials:
        tree.push(node, value)
    return tree.total()


class TreeReduce:
    """Writes the sum of a tree's buffers into `out`. `regions` gives the buffers' dtypes.

    It works from front to back and can be run in parts, as far as the buffers have arrived.
    """

    def __init__(self, tree: SumTree, out: Tensor, regions: Sequence[DtypeRegion]) -> None:
        self._ends: list[int] = []
        self._operations: list[list[tuple[Tensor, Tensor | None, Tensor]]] = []
        self._chunks_done = 0
        self._scratch = torch.empty(_scratch_depth(tree) * CHUNK_BYTES, dtype=torch.uint8, device=out.device)
        for region in regions:
            shape = tree if region.is_summed else _lowest_leaf(tree)
            for piece in _chunks(region):
                self._operations.append([])
                self._ends.append(piece.stop)
                out_piece = piece.view_in(out)
                value = self._plan(shape, out_piece, piece, level=0)
                if value is not out_piece:
                    self._operations[-1].append((value, None, out_piece))

    def _plan(self, tree: SumTree, out: Tensor, piece: DtypeRegion, *, level: int) -> Tensor:
        """The left subtree is summed in `out` itself, the right one in the scratch of this level. The right subtree's
        own right side uses the next level."""
        if isinstance(tree, Tensor):
            return piece.view_in(tree)
        left = self._plan(tree[0], out, piece, level=level)
        start = level * CHUNK_BYTES
        scratch = self._scratch[start : start + piece.stop - piece.start].view(piece.dtype)
        right = self._plan(tree[1], scratch, piece, level=level + 1)
        self._operations[-1].append((left, right, out))
        return out

    def restart(self) -> None:
        self._chunks_done = 0

    def run(self, until: int) -> None:
        """Sum the chunks within the first `until` bytes."""
        while self._chunks_done < len(self._ends) and self._ends[self._chunks_done] <= until:
            for left, right, out in self._operations[self._chunks_done]:
                if right is None:
                    out.copy_(left)
                else:
                    torch.add(left, right, out=out)
            self._chunks_done += 1


def _chunks(region: DtypeRegion) -> list[DtypeRegion]:
    starts = range(region.start, region.stop, CHUNK_BYTES)
    return [DtypeRegion(region.dtype, region.is_summed, a, min(a + CHUNK_BYTES, region.stop)) for a in starts]


def _lowest_leaf(tree: SumTree) -> Tensor:
    return tree if isinstance(tree, Tensor) else _lowest_leaf(tree[0])


def _scratch_depth(tree: SumTree) -> int:
    """Number of scratch buffers in use at once."""
    return 0 if isinstance(tree, Tensor) else max(_scratch_depth(tree[0]), 1 + _scratch_depth(tree[1]))
