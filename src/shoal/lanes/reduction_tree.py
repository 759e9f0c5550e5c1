"""The fixed binary tree over lane numbers, on which all results of lanes are summed.

Node (level, index) covers the lanes [index * 2^level, (index + 1) * 2^level). Its value is left + right; a side
without samples adds nothing. The shape depends on lane numbers alone, so the sum has the same bits for every assignment
of lanes to workers: a worker sums its part of the tree, and its peers finish the sum in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")
Node = tuple[int, int]


class TreeSum(Generic[T]):
    """Takes lanes or finished nodes in any order and adds siblings as soon as it has both.

    `add(a, b)` may reuse the memory of `a`. A lane without samples is pushed as None.
    If lanes come in ascending order, at most log2(lanes) + 1 values are held.
    """

    def __init__(self, lanes: int, add: Callable[[T, T], T]) -> None:
        self.lanes = lanes
        self.height = max(lanes - 1, 0).bit_length()
        self._add = add
        self._nodes: dict[Node, T | None] = {}

    def push(self, node: Node, value: T | None) -> None:
        top, merged = self.merge_path(node)
        for sibling, comes_first in merged:
            other = self._nodes.pop(sibling)
            value = self._sum(other, value) if comes_first else self._sum(value, other)
        self._nodes[top] = value

    def merge_path(self, node: Node) -> tuple[Node, list[tuple[Node, bool]]]:
        """The node that a value for this node ends up in, and the held nodes that it is added to on the way; True: the
        held node is the left operand."""
        merged: list[tuple[Node, bool]] = []
        while True:
            if node in self._nodes:
                raise ValueError(f"node {node} was given twice")
            level, index = node
            sibling = (level, index ^ 1)
            if level == self.height:
                return node, merged
            if sibling in self._nodes:
                merged.append((sibling, index % 2 == 1))
            elif (index ^ 1) << level < self.lanes:
                return node, merged
            node = (level + 1, index >> 1)  # a sibling beyond the last lane adds nothing

    def push_lane(self, number: int, value: T | None) -> None:
        self.push((0, number), value)

    def _sum(self, left: T | None, right: T | None) -> T | None:
        if left is None or right is None:
            return right if left is None else left
        return self._add(left, right)

    @property
    def partials(self) -> dict[Node, T | None]:
        """The largest complete nodes: the partial sums that a worker sends."""
        return dict(self._nodes)

    def total(self) -> T | None:
        """The sum over all lanes; None if no lane had samples."""
        if list(self._nodes) != [(self.height, 0)]:
            raise ValueError(f"the sum is not complete: {sorted(self._nodes)}")
        return self._nodes[(self.height, 0)]


def partial_nodes(carried: Iterable[int], lanes: int) -> list[Node]:
    """The partial sums of a worker that runs these lanes, in order."""
    tree: TreeSum[int] = TreeSum(lanes, lambda a, b: a)
    for lane in sorted(carried):
        tree.push_lane(lane, 0)
    return sorted(tree.partials, key=lambda node: node[1] << node[0])
