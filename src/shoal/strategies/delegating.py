"""A strategy around another one. Subclasses override what they change."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shoal.checkpoint.state_tree import State
from shoal.collectives.outcome import Committed, Discarded
from shoal.data.datasets import DatasetSplit
from shoal.spec.view import View
from shoal.strategies.base import FinalModel, Metrics, Strategy, Traits


class DelegatingStrategy:
    """See Strategy. Every call goes to `inner`."""

    def __init__(self, inner: Strategy) -> None:
        self._inner = inner

    @property
    def traits(self) -> Traits:
        return self._inner.traits

    @property
    def lr(self) -> float:
        return self._inner.lr

    @property
    def is_saved(self) -> bool:
        return self._inner.is_saved

    def enter(self, view: View, seat: int) -> Discarded | None:
        return self._inner.enter(view, seat)

    def follow(self, view: View, seat: int) -> Iterator[bool]:
        return self._inner.follow(view, seat)

    def run_step(self, must_halt: Callable[[], bool]) -> Committed | Discarded:
        return self._inner.run_step(must_halt)

    def leave_view(self) -> Discarded | None:
        return self._inner.leave_view()

    def evaluate(self, split: DatasetSplit) -> Metrics | Discarded:
        return self._inner.evaluate(split)

    def adopt_metrics(self, metrics: Metrics, monitored: float | None) -> None:
        self._inner.adopt_metrics(metrics, monitored)

    def save(self, *, force: bool = False) -> None:
        self._inner.save(force=force)

    def save_alone(self) -> None:
        self._inner.save_alone()

    def restore(self) -> int | None:
        return self._inner.restore()

    def finish(self, conclude: Callable[[FinalModel], None]) -> Discarded | None:
        return self._inner.finish(conclude)

    def hand_over(self, given_up: Callable[[], bool]) -> None:
        self._inner.hand_over(given_up)

    def state(self) -> State | None:
        return self._inner.state()

    def abort(self, view: int) -> None:
        self._inner.abort(view)

    def moved_bytes(self) -> int:
        return self._inner.moved_bytes()

    def close(self) -> None:
        self._inner.close()
