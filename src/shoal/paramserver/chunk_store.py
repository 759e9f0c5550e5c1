"""A server's chunks: parameters, optimizer state and version stamps; and their updates.

Flat buffers have the workers' layout, so byte offsets mean the same on workers and servers. Pages of chunks that this
server does not hold are never touched. Nothing here depends on connections.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.checkpoint.state_tree import State
from shoal.collectives.transport.shared_memory import ByteBuffer
from shoal.lanes.clipping import divisor_of, scale_gradients, slice_norms
from shoal.lanes.elementwise import make_optimizer
from shoal.lanes.flat_layout import FlatLayout, TensorRange
from shoal.lanes.replica import optimizer_step
from shoal.lanes.sparse.table_spec import TableSpec
from shoal.paramserver.optimizer_slices import OptimizerSlice, OptimizerState, copy_state, merge_slices, why_unfit
from shoal.paramserver.protocol import HOW_APPLIED_FLAGS
from shoal.paramserver.sparse.row_tables import RowTables
from shoal.spec.job import ELEMENTWISE_OPTIMIZERS

MAX_STAMP = 1 << 62
_MAX_CACHED_SOURCES = 8
Hyperparameters = Sequence[dict[str, Any]]
"""The options of each parameter group, without the parameters."""


@dataclass(frozen=True)
class UpdateBatch:
    """Slices that the optimizer updates in one call: parameters by group, and their state."""

    slices: list[OptimizerSlice]
    groups: dict[int, list[nn.Parameter]]
    state: defaultdict[Tensor, OptimizerState]
    _grads_by_source: dict[int, tuple[Tensor, list[Tensor]]] = field(default_factory=dict)

    def grads(self, source: Tensor) -> list[Tensor]:
        """The slices' gradients in a flat buffer. Cached, because there are few such buffers."""
        known, grads = self._grads_by_source.get(id(source), (None, []))
        if known is not source:
            if len(self._grads_by_source) >= _MAX_CACHED_SOURCES:
                self._grads_by_source.clear()
            grads = [one.view_in(source) for one in self.slices]
            self._grads_by_source[id(source)] = source, grads
        return grads


class ChunkStore:
    """Chunks are given as ranges [first, last). A chunk is unusable until `write_state` has set it.

    `groups` has the parameter group of each gradient, -1 for parameters without optimizer. The caller advances the
    stamps: `applied` (the next step of a chunk), `clocks` (the next step of each lane), `term` and `seq`. A term of 0
    marks a chunk without state. `how_applied` has flags, divisor and coefficient of the last step. The rows of sparse
    `tables` are in `row_tables`.
    """

    def __init__(
        self,
        layout: FlatLayout,
        *,
        optimizer: type[torch.optim.Optimizer],
        groups: Sequence[int],
        hyper: Hyperparameters,
        lanes: int,
        parameters: ByteBuffer | None = None,
        sums: ByteBuffer | None = None,
        tables: Sequence[TableSpec] = (),
    ) -> None:
        if len(groups) != len(layout.grads) or not all(-1 <= group < len(hyper) for group in groups):
            raise ValueError("each gradient needs an existing parameter group, or -1")
        self.layout = layout
        self.parameters = parameters or ByteBuffer.private(layout.size_bytes)
        self.sums = sums or ByteBuffer.private(layout.size_bytes)
        self.chunk_count = len(layout.chunk_offsets) - 1
        # in numpy, which is faster than torch for few numbers
        self.applied, self.term, self.seq = np.zeros((3, self.chunk_count), dtype=np.int64)
        self.clocks = np.zeros((self.chunk_count, lanes), dtype=np.int64)
        self.how_applied = np.zeros((self.chunk_count, 3), dtype=np.float64)
        self.row_tables = RowTables(tables) if tables else None
        self._groups = list(groups)
        self._hyper = [dict(options) for options in hyper]
        self._optimizer = make_optimizer(optimizer, self._hyper, [[nn.Parameter(torch.zeros(1))] for _ in hyper])
        self._hyper = [{**self._optimizer.defaults, **options} for options in self._hyper]
        self._slices: list[OptimizerSlice] = []
        self._update_batches: dict[tuple[int, int], list[UpdateBatch]] = {}

    # ---- updates ----

    def set_pieces(self, pieces: Iterable[tuple[int, int]]) -> None:
        """Set which chunks are updated together. Chunks outside of all pieces keep their state."""
        for first, last in pieces:
            self._merged_slices(*self._byte_range(first, last))

    def norms(self, first: int, last: int) -> list[float]:
        """The norms of these chunks' slices in `sums`, in the order of the flat buffer."""
        slices = self.layout.slices
        begin, end = (bisect_left(slices, chunk, key=lambda part: part.chunk) for chunk in (first, last))
        norms = slice_norms(self._sum_slices[begin:end])
        return list(torch.stack(norms).tolist()) if norms else []

    @cached_property
    def _sum_slices(self) -> list[Tensor]:
        return [self.sums.tensor[part.start : part.stop].view(part.dtype) for part in self.layout.slices]

    def scale(self, first: int, last: int, *, count: float | None = None, coefficient: float | None = None) -> None:
        """Divide and multiply the gradients in `sums`, in place; not the tail."""
        parts = self.layout.tensor_ranges(*self._byte_range(first, last))
        grads = [self.sums.tensor[part.start : part.stop].view(self._dtype(part)) for part in parts]
        self._scale(grads, count, coefficient, None)

    def apply(
        self,
        first: int,
        last: int,
        *,
        hyper: Hyperparameters,
        source: Tensor | None = None,
        count: float | None = None,
        coefficient: float | Tensor | None = None,
        clip_value: float | None = None,
    ) -> None:
        """Update these chunks once from the sums in the flat buffer `source`, which is not changed.

        Options that `hyper` does not name keep their initial values. The tail is copied.
        """
        source = self.sums.tensor if source is None else source
        for batch in self._update_batches_for(first, last):
            grads = batch.grads(source)
            scaling = not (count is coefficient is clip_value is None)
            if scaling or self._may_modify_gradients(hyper):
                grads = [grad.clone() for grad in grads]
            if scaling:
                self._scale(grads, count, coefficient, clip_value)
            self._step(batch, grads, hyper)
        if last == self.chunk_count:
            self.parameters.tensor[self.layout.tail :].copy_(source[self.layout.tail : self.layout.size_bytes])

    def _scale(
        self, grads: list[Tensor], count: float | None, coefficient: float | Tensor | None, value: float | None
    ) -> None:
        divisor = None if count is None else divisor_of(count, self.layout.grads[0].dtype)
        factor = None if coefficient is None else torch.as_tensor(coefficient, dtype=torch.float64)
        if grads:
            scale_gradients(grads, count=divisor, coefficient=factor, value=value)

    def _step(self, batch: UpdateBatch, grads: list[Tensor], hyper: Hyperparameters) -> None:
        for optimizer_slice, grad in zip(batch.slices, grads, strict=True):
            optimizer_slice.parameter.grad = grad
        optimizer = self._optimizer
        optimizer.state = batch.state
        optimizer.param_groups = [
            {**self._hyper[group], **hyper[group], "params": parameters} for group, parameters in batch.groups.items()
        ]
        try:
            optimizer_step(optimizer)
        finally:
            for optimizer_slice in batch.slices:
                optimizer_slice.parameter.grad = None

    def _may_modify_gradients(self, hyper: Hyperparameters) -> bool:
        """Whether the optimizer may write into gradients. Of torch's own, only the foreach kind does."""
        from_torch = type(self._optimizer).__module__.startswith("torch.optim.")
        return not from_torch or any({**old, **new}.get("foreach") for old, new in zip(self._hyper, hyper, strict=True))

    def _update_batches_for(self, first: int, last: int) -> list[UpdateBatch]:
        if (first, last) not in self._update_batches:
            span = self._byte_range(first, last)
            slices = self._merged_slices(*span)
            if not _covers([one.tensor_range for one in slices], self.layout.tensor_ranges(*span)):
                raise ValueError(f"chunks {first} to {last} are not all held here")
            # a fused optimizer needs all of its parameters at their first step, or none
            updated = [one for one in slices if self._groups[one.tensor_range.place] >= 0]
            batches = (
                [one for one in updated if not one.state],
                [one for one in updated if one.state],
            )
            self._update_batches[first, last] = [self._make_update_batch(batch) for batch in batches if batch]
        return self._update_batches[first, last]

    def _make_update_batch(self, slices: list[OptimizerSlice]) -> UpdateBatch:
        groups: dict[int, list[nn.Parameter]] = {}
        for optimizer_slice in slices:
            groups.setdefault(self._groups[optimizer_slice.tensor_range.place], []).append(optimizer_slice.parameter)
        return UpdateBatch(
            slices,
            groups,
            defaultdict(dict, {one.parameter: one.state for one in slices}),
        )

    # ---- contents ----

    def read_state(self, first: int, last: int) -> State:
        """A copy of these chunks' state: for `write_state`, here or on another server."""
        start, stop = self._byte_range(first, last)
        slices = [
            one.narrow(max(one.tensor_range.start, start), min(one.tensor_range.stop, stop))
            for one in self._overlapping_slices(start, stop)
        ]
        if not _covers([one.tensor_range for one in slices], self.layout.tensor_ranges(start, stop)):
            raise ValueError(f"chunks {first} to {last} are not all held here")
        stamps = {name: stamp[first:last].clone() for name, stamp in self._stamps().items()}
        content = self.parameters.tensor[start:stop].clone()
        return {
            "parameters": content,
            "runs": [_describe_slice(one.tensor_range, copy_state(one.state)) for one in slices],
            **stamps,
        }

    def write_state(self, first: int, last: int, state: State) -> None:
        """Replace the state of these chunks by that of `read_state`. ValueError if it is not these chunks' state."""
        start, stop = self._byte_range(first, last)
        targets = {name: stamp[first:last] for name, stamp in self._stamps().items()}
        targets["parameters"] = self.parameters.tensor[start:stop]
        try:
            values = {name: state[name] for name in targets}
            slices = [self._parse_slice(row) for row in state["runs"]]
        except (KeyError, TypeError, IndexError, OverflowError, RuntimeError) as problem:
            raise ValueError(f"not the state of chunks: {problem!r:.200}") from None
        for name, target in targets.items():
            value = values[name]
            if not isinstance(value, Tensor) or (value.dtype, value.shape) != (target.dtype, target.shape):
                raise ValueError(f"{name} of other chunks")
        if not all(_is_valid_stamp(values[name]) for name in self._stamps()):
            raise ValueError("stamps out of range")
        if not _covers([one.tensor_range for one in slices], self.layout.tensor_ranges(start, stop)):
            raise ValueError("optimizer state of other chunks")
        for name, target in targets.items():
            target.copy_(values[name])
        self._replace_slices(start, stop, slices)

    def drop(self, first: int, last: int) -> None:
        """Drop these chunks and their rows."""
        if self.row_tables is not None:
            self.row_tables.drop(first, last)
        self._replace_slices(*self._byte_range(first, last), [])
        for stamp in self._stamps().values():
            stamp[first:last] = 0

    def _stamps(self) -> dict[str, Tensor]:
        stamps = {"applied": self.applied, "clocks": self.clocks, "term": self.term, "seq": self.seq}
        return {name: torch.from_numpy(stamp) for name, stamp in (stamps | {"manner": self.how_applied}).items()}

    def _parse_slice(self, row: Any) -> OptimizerSlice:
        part = TensorRange(*(row[name] for name in TensorRange._fields))
        if any(type(number) is not int for number in part) or not 0 <= part.place < len(self._groups):
            raise ValueError("optimizer state of a tensor that the model does not have")
        size = self._dtype(part).itemsize
        if part.start >= part.stop or part.start % size or part.stop % size:
            raise ValueError("optimizer state that does not begin and end at an element")
        if why := why_unfit(row["state"], (part.stop - part.start) // size):
            raise ValueError(why)
        return self._make_slice(part, copy_state(row["state"]))

    # ---- slices ----

    def _byte_range(self, first: int, last: int) -> tuple[int, int]:
        if not 0 <= first < last <= self.chunk_count:
            raise ValueError(f"chunks {first} to {last} of {self.chunk_count}")
        return self.layout.chunk_offsets[first], self.layout.chunk_offsets[last]

    def _dtype(self, tensor_range: TensorRange) -> torch.dtype:
        return self.layout.grads[tensor_range.place].dtype

    def _make_slice(self, tensor_range: TensorRange, state: OptimizerState) -> OptimizerSlice:
        return OptimizerSlice(tensor_range, self._dtype(tensor_range), self.parameters.tensor, state)

    def _overlapping_slices(self, start: int, stop: int) -> list[OptimizerSlice]:
        """The slices that contain any of these bytes."""
        begin = bisect_left(self._slices, start + 1, key=lambda one: one.tensor_range.stop)
        end = bisect_left(self._slices, stop, key=lambda one: one.tensor_range.start)
        return self._slices[begin:end]

    def _merged_slices(self, start: int, stop: int) -> list[OptimizerSlice]:
        """The slices of exactly these bytes, as few as possible."""
        existing = self._overlapping_slices(start, stop)
        slices = merge_slices([_clip_slice(one, start, stop) for one in existing])
        if len(slices) != len(existing) or any(new is not old for new, old in zip(slices, existing, strict=True)):
            self._replace_slices(start, stop, slices)
        return slices

    def _replace_slices(self, start: int, stop: int, slices: list[OptimizerSlice]) -> None:
        """Replace the slices in [start, stop); slices that reach beyond its ends keep what lies outside."""
        replaced = self._overlapping_slices(start, stop)
        begin = bisect_left(self._slices, start + 1, key=lambda one: one.tensor_range.stop)
        before = [one.narrow(one.tensor_range.start, start) for one in replaced[:1] if one.tensor_range.start < start]
        after = [one.narrow(stop, one.tensor_range.stop) for one in replaced[-1:] if one.tensor_range.stop > stop]
        self._slices[begin : begin + len(replaced)] = [*before, *slices, *after]
        lowest = min([start, *(one.tensor_range.start for one in replaced[:1])])
        highest = max([stop, *(one.tensor_range.stop for one in replaced[-1:])])
        offsets = self.layout.chunk_offsets
        self._update_batches = {
            key: batches
            for key, batches in self._update_batches.items()
            if offsets[key[1]] <= lowest or offsets[key[0]] >= highest
        }


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """One of torch's elementwise optimizers. ValueError for any other."""
    if name not in ELEMENTWISE_OPTIMIZERS:
        raise ValueError(f"the optimizer {name!r:.40} is not one of {', '.join(ELEMENTWISE_OPTIMIZERS)}")
    kind: type[torch.optim.Optimizer] = getattr(torch.optim, name)
    return kind


def _is_valid_stamp(stamp: Tensor) -> bool:
    if not stamp.is_floating_point():
        return bool(((stamp >= 0) & (stamp < MAX_STAMP)).all())
    return bool(((stamp[:, 0] >= 0) & (stamp[:, 0] <= HOW_APPLIED_FLAGS)).all())


def _clip_slice(optimizer_slice: OptimizerSlice, start: int, stop: int) -> OptimizerSlice:
    inside = max(optimizer_slice.tensor_range.start, start), min(optimizer_slice.tensor_range.stop, stop)
    return (
        optimizer_slice
        if inside == (optimizer_slice.tensor_range.start, optimizer_slice.tensor_range.stop)
        else optimizer_slice.narrow(*inside)
    )


def _describe_slice(tensor_range: TensorRange, state: OptimizerState) -> dict[str, Any]:
    return {**tensor_range._asdict(), "state": state}


def _covers(parts: Sequence[TensorRange], wanted: Sequence[TensorRange]) -> bool:
    """Whether the parts are exactly the wanted bytes, in order, each once."""
    joined: list[TensorRange] = []
    for part in parts:
        if joined and (joined[-1].place, joined[-1].stop) == (part.place, part.start):
            joined[-1] = joined[-1]._replace(stop=part.stop)
        else:
            joined.append(part)
    return joined == list(wanted)
