"""What a server holds: parameters, the optimizer's state and the stamps of chunks; and how it updates them.

All that lies in stretches lies as the workers' layout says, so that byte offsets mean the same to everybody; pages of
chunks that are not held here are never touched. Nothing here knows of connections.
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

from shoal.checkpoint.tree import State
from shoal.parallel.clipping import scale, slice_norms
from shoal.parallel.flat import Layout, Part
from shoal.parallel.links.memory import Memory
from shoal.parallel.replica import update
from shoal.parallel.server.elementwise import made
from shoal.parallel.server.runs import OptimizerState, Run, merged, own_state, why_unfit
from shoal.parallel.sparse.shelf import Shelf
from shoal.parallel.sparse.spec import TableSpec
from shoal.spec.job import ELEMENTWISE

MOST_STAMP = 1 << 62
_MOST_SOURCES = 8
Hyper = Sequence[dict[str, Any]]
"""The options of each parameter group, without the parameters."""


@dataclass(frozen=True)
class Stint:
    """Runs that the optimizer takes in one call: parameters by group, and their state."""

    runs: list[Run]
    groups: dict[int, list[nn.Parameter]]
    state: defaultdict[Tensor, OptimizerState]
    _grads: dict[int, tuple[Tensor, list[Tensor]]] = field(default_factory=dict)

    def grads(self, source: Tensor) -> list[Tensor]:
        """What lies in a stretch of the runs. Nearly always one of a few stretches."""
        known, found = self._grads.get(id(source), (None, []))
        if known is not source:
            if len(self._grads) >= _MOST_SOURCES:
                self._grads.clear()
            found = [run.of(source) for run in self.runs]
            self._grads[id(source)] = source, found
        return found


class Shard:
    """Chunks are named by ranges [first, last); one that nothing was `put` into holds nothing and cannot be used.

    `groups` has the parameter group of each gradient, -1 for what the optimizer leaves alone. The stamps are the
    caller's to move: `applied` (the next step of a chunk), `clocks` (of each lane), `term` and `seq`. A term of 0 says
    that nothing was put there. `manner` is how the last step was applied: flags, divisor, coefficient. Rows of sparse
    `tables` lie on the `shelf`, if there are any, and are taken and put there.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        optimizer: type[torch.optim.Optimizer],
        groups: Sequence[int],
        hyper: Hyper,
        lanes: int,
        parameters: Memory | None = None,
        sums: Memory | None = None,
        tables: Sequence[TableSpec] = (),
    ) -> None:
        if len(groups) != len(layout.grads) or not all(-1 <= group < len(hyper) for group in groups):
            raise ValueError("each gradient needs a group that there is")
        self.layout = layout
        self.parameters = parameters or Memory.private(layout.size_bytes)
        self.sums = sums or Memory.private(layout.size_bytes)
        self.chunks = len(layout.cuts) - 1
        # in numpy, for which few numbers are less work than for torch
        self.applied, self.term, self.seq = np.zeros((3, self.chunks), dtype=np.int64)
        self.clocks = np.zeros((self.chunks, lanes), dtype=np.int64)
        self.manner = np.zeros((self.chunks, 3), dtype=np.float64)
        self.shelf = Shelf(tables) if tables else None
        self._groups = list(groups)
        self._hyper = [dict(options) for options in hyper]
        self._optimizer = made(optimizer, self._hyper, [[nn.Parameter(torch.zeros(1))] for _ in hyper])
        self._hyper = [{**self._optimizer.defaults, **options} for options in self._hyper]
        self._runs: list[Run] = []
        self._stints: dict[tuple[int, int], list[Stint]] = {}

    # ---- updates ----

    def arrange(self, pieces: Iterable[tuple[int, int]]) -> None:
        """What is updated together from now on. Chunks that stand in no piece are kept as they are."""
        for first, last in pieces:
            self._arranged(*self._span(first, last))

    def norms(self, first: int, last: int) -> list[float]:
        """Of the slices of these chunks in `sums`, in the order of the stretch."""
        slices = self.layout.slices
        begin, end = (bisect_left(slices, chunk, key=lambda it: it.chunk) for chunk in (first, last))
        found = slice_norms(self._sum_slices[begin:end])
        return list(torch.stack(found).tolist()) if found else []

    @cached_property
    def _sum_slices(self) -> list[Tensor]:
        return [self.sums.tensor[it.start : it.stop].view(it.dtype) for it in self.layout.slices]

    def scale(self, first: int, last: int, *, count: float | None = None, coefficient: float | None = None) -> None:
        """Divide and multiply what lies in `sums`, in place. The tail stays as it is."""
        parts = self.layout.parts(*self._span(first, last))
        grads = [self.sums.tensor[it.start : it.stop].view(self._dtype(it)) for it in parts]
        self._scale(grads, count, coefficient, None)

    def apply(
        self,
        first: int,
        last: int,
        *,
        hyper: Hyper,
        source: Tensor | None = None,
        count: float | None = None,
        coefficient: float | Tensor | None = None,
        clip_value: float | None = None,
    ) -> None:
        """One update of these chunks from the sums that lie in `source` (a stretch), which stays as it is.

        Options that `hyper` does not name are those of the beginning. Of the tail, the last is kept as it came.
        """
        source = self.sums.tensor if source is None else source
        for stint in self._stints_of(first, last):
            grads = stint.grads(source)
            scaling = not (count is coefficient is clip_value is None)
            if scaling or self._spoils_gradients(hyper):
                grads = [grad.clone() for grad in grads]
            if scaling:
                self._scale(grads, count, coefficient, clip_value)
            self._step(stint, grads, hyper)
        if last == self.chunks:
            self.parameters.tensor[self.layout.tail :].copy_(source[self.layout.tail : self.layout.size_bytes])

    def _scale(
        self, grads: list[Tensor], count: float | None, coefficient: float | Tensor | None, value: float | None
    ) -> None:
        divisor = None if count is None else torch.tensor(count, dtype=torch.float64).to(self.layout.grads[0].dtype)
        factor = None if coefficient is None else torch.as_tensor(coefficient, dtype=torch.float64)
        if grads:
            scale(grads, count=divisor, coefficient=factor, value=value)

    def _step(self, stint: Stint, grads: list[Tensor], hyper: Hyper) -> None:
        for run, grad in zip(stint.runs, grads, strict=True):
            run.parameter.grad = grad
        optimizer = self._optimizer
        optimizer.state = stint.state
        optimizer.param_groups = [
            {**self._hyper[group], **hyper[group], "params": parameters} for group, parameters in stint.groups.items()
        ]
        try:
            update(optimizer)
        finally:
            for run in stint.runs:
                run.parameter.grad = None

    def _spoils_gradients(self, hyper: Hyper) -> bool:
        """May the optimizer write into gradients? Of torch's own, only the foreach kind does."""
        ours = type(self._optimizer).__module__.startswith("torch.optim.")
        return not ours or any({**old, **new}.get("foreach") for old, new in zip(self._hyper, hyper, strict=True))

    def _stints_of(self, first: int, last: int) -> list[Stint]:
        if (first, last) not in self._stints:
            span = self._span(first, last)
            runs = self._arranged(*span)
            if not _cover([run.part for run in runs], self.layout.parts(*span)):
                raise ValueError(f"chunks {first} to {last} are not all held here")
            # a fused optimizer wants all of its parameters at their first step, or none
            moved = [run for run in runs if self._groups[run.part.place] >= 0]
            split = [run for run in moved if not run.state], [run for run in moved if run.state]
            self._stints[first, last] = [self._stint(runs) for runs in split if runs]
        return self._stints[first, last]

    def _stint(self, runs: list[Run]) -> Stint:
        groups: dict[int, list[nn.Parameter]] = {}
        for run in runs:
            groups.setdefault(self._groups[run.part.place], []).append(run.parameter)
        return Stint(runs, groups, defaultdict(dict, {run.parameter: run.state for run in runs}))

    # ---- contents ----

    def take(self, first: int, last: int) -> State:
        """All that these chunks hold, as copies: for `put`, here or on another server."""
        start, stop = self._span(first, last)
        runs = [run.cut(max(run.part.start, start), min(run.part.stop, stop)) for run in self._among(start, stop)]
        if not _cover([run.part for run in runs], self.layout.parts(start, stop)):
            raise ValueError(f"chunks {first} to {last} are not all held here")
        stamps = {name: stamp[first:last].clone() for name, stamp in self._stamps().items()}
        content = self.parameters.tensor[start:stop].clone()
        return {"parameters": content, "runs": [_told(run.part, own_state(run.state)) for run in runs], **stamps}

    def put(self, first: int, last: int, state: State) -> None:
        """Hold what was taken elsewhere, in place of what was held. ValueError if it is not these chunks' state."""
        start, stop = self._span(first, last)
        places = {name: stamp[first:last] for name, stamp in self._stamps().items()}
        places["parameters"] = self.parameters.tensor[start:stop]
        try:
            values = {name: state[name] for name in places}
            runs = [self._heard(row) for row in state["runs"]]
        except (KeyError, TypeError, IndexError, OverflowError, RuntimeError) as problem:
            raise ValueError(f"not the state of chunks: {problem!r:.200}") from None
        for name, place in places.items():
            value = values[name]
            if not isinstance(value, Tensor) or (value.dtype, value.shape) != (place.dtype, place.shape):
                raise ValueError(f"{name} of other chunks")
        if not all(_sensible(values[name]) for name in self._stamps()):
            raise ValueError("stamps that nobody makes")
        if not _cover([run.part for run in runs], self.layout.parts(start, stop)):
            raise ValueError("optimizer state of other chunks")
        for name, place in places.items():
            place.copy_(values[name])
        self._replace(start, stop, runs)

    def drop(self, first: int, last: int) -> None:
        """Hold these chunks no longer, nor their rows."""
        if self.shelf is not None:
            self.shelf.drop(first, last)
        self._replace(*self._span(first, last), [])
        for stamp in self._stamps().values():
            stamp[first:last] = 0

    def _stamps(self) -> dict[str, Tensor]:
        stamps = {"applied": self.applied, "clocks": self.clocks, "term": self.term, "seq": self.seq}
        return {name: torch.from_numpy(stamp) for name, stamp in (stamps | {"manner": self.manner}).items()}

    def _heard(self, row: Any) -> Run:
        part = Part(*(row[name] for name in Part._fields))
        if any(type(number) is not int for number in part) or not 0 <= part.place < len(self._groups):
            raise ValueError("optimizer state of a tensor that is not there")
        size = self._dtype(part).itemsize
        if part.start >= part.stop or part.start % size or part.stop % size:
            raise ValueError("optimizer state of half an element")
        if why := why_unfit(row["state"], (part.stop - part.start) // size):
            raise ValueError(why)
        return self._run(part, own_state(row["state"]))

    # ---- runs ----

    def _span(self, first: int, last: int) -> tuple[int, int]:
        if not 0 <= first < last <= self.chunks:
            raise ValueError(f"chunks {first} to {last} of {self.chunks}")
        return self.layout.cuts[first], self.layout.cuts[last]

    def _dtype(self, part: Part) -> torch.dtype:
        return self.layout.grads[part.place].dtype

    def _run(self, part: Part, state: OptimizerState) -> Run:
        return Run(part, self._dtype(part), self.parameters.tensor, state)

    def _among(self, start: int, stop: int) -> list[Run]:
        """Runs that have some of these bytes."""
        begin = bisect_left(self._runs, start + 1, key=lambda run: run.part.stop)
        end = bisect_left(self._runs, stop, key=lambda run: run.part.start)
        return self._runs[begin:end]

    def _arranged(self, start: int, stop: int) -> list[Run]:
        """The runs of exactly these bytes, as few as possible."""
        there = self._among(start, stop)
        runs = merged([_within(run, start, stop) for run in there])
        if len(runs) != len(there) or any(new is not old for new, old in zip(runs, there, strict=True)):
            self._replace(start, stop, runs)
        return runs

    def _replace(self, start: int, stop: int, runs: list[Run]) -> None:
        """Put these runs where [start, stop) is; of runs that reach over its ends, what lies outside stays."""
        there = self._among(start, stop)
        begin = bisect_left(self._runs, start + 1, key=lambda run: run.part.stop)
        before = [run.cut(run.part.start, start) for run in there[:1] if run.part.start < start]
        after = [run.cut(stop, run.part.stop) for run in there[-1:] if run.part.stop > stop]
        self._runs[begin : begin + len(there)] = [*before, *runs, *after]
        lowest = min([start, *(run.part.start for run in there[:1])])
        highest = max([stop, *(run.part.stop for run in there[-1:])])
        cuts = self.layout.cuts
        self._stints = {
            key: stints for key, stints in self._stints.items() if cuts[key[1]] <= lowest or cuts[key[0]] >= highest
        }


def optimizer_of(name: str) -> type[torch.optim.Optimizer]:
    """One of torch's that treat every element by itself. ValueError for any other."""
    if name not in ELEMENTWISE:
        raise ValueError(f"an optimizer {name!r:.40}, and servers have {', '.join(ELEMENTWISE)}")
    kind: type[torch.optim.Optimizer] = getattr(torch.optim, name)
    return kind


def _sensible(stamp: Tensor) -> bool:
    if not stamp.is_floating_point():
        return bool(((stamp >= 0) & (stamp < MOST_STAMP)).all())
    return bool(((stamp[:, 0] >= 0) & (stamp[:, 0] < 256)).all())  # flags


def _within(run: Run, start: int, stop: int) -> Run:
    inside = max(run.part.start, start), min(run.part.stop, stop)
    return run if inside == (run.part.start, run.part.stop) else run.cut(*inside)


def _told(part: Part, state: OptimizerState) -> dict[str, Any]:
    return {**part._asdict(), "state": state}


def _cover(parts: Sequence[Part], wanted: Sequence[Part]) -> bool:
    """Are these the wanted bytes, in order, each once?"""
    joined: list[Part] = []
    for part in parts:
        if joined and (joined[-1].place, joined[-1].stop) == (part.place, part.start):
            joined[-1] = joined[-1]._replace(stop=part.stop)
        else:
            joined.append(part)
    return joined == list(wanted)
