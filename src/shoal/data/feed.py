"""What the training loop asks: the batch of a lane at a step, loaded ahead where that helps.

A batch is a pure function of (seed, step, lane). Threads, processes and the order of requests change when it
is made, never what it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing

from shoal.data.ahead import Ahead, Deals, Recipe, Scout, open_ahead
from shoal.data.batch import Batch
from shoal.data.chance import Augment
from shoal.data.source import Ids, Source
from shoal.spec.data import Loader
from shoal.spec.seeds import AUGMENT, EVALUATION


class Feed:
    """The batches of a run. Belongs to the training thread; carries all lanes until it is told otherwise."""

    def __init__(
        self,
        source: Source,
        dealer: Deals,
        *,
        seed: int,
        lanes: int,
        augment: Callable[..., Batch] | None = None,
        transform: Callable[[Batch], Batch] | None = None,
        loader: Loader | None = None,
    ) -> None:
        loader = loader or Loader()
        recipe = Recipe(source, seed, AUGMENT, transform, Augment.of(augment) if augment else None)
        self._make = recipe.make
        self._dealer = dealer
        self._ahead = open_ahead(recipe, loader)
        blocks = source.blocks is not None and dealer.window_steps > 0 and self._ahead is None
        self._scout = Scout(source, dealer) if blocks and loader.workers == "auto" else None
        self._prefetch = loader.prefetch
        self._lanes: Sequence[int] = range(lanes)
        self._asked_to = dict.fromkeys(self._lanes, 0)

    def carry(self, lanes: Sequence[int], step: int) -> None:
        """From this step on these lanes are mine: load ahead in the order in which I shall ask."""
        self._lanes = tuple(lanes)
        self._asked_to = dict.fromkeys(self._lanes, step)
        if self._scout:
            self._scout.start_at(step)
        if self._ahead:
            self._ahead.forget()
            for ahead in range(step, step + self._prefetch + 1):
                for lane in self._lanes:
                    self._ask(lane, ahead)

    def get(self, step: int, lane: int) -> Batch | None:
        """The batch of a lane, None if it has no samples at this step. Any order of requests is right."""
        if self._ahead:
            self._follow(lane, step)
            batch = self._ahead.answer((step, lane))
            if batch is not None:
                return batch
        if self._scout:
            self._scout.look(step, self._lanes)
        ids = self._dealer.ids(step, lane)
        return self._make((step, lane), ids) if len(ids) else None

    def close(self) -> None:
        for helper in (self._ahead, self._scout):
            if helper:
                helper.close()

    def _follow(self, lane: int, step: int) -> None:
        """Each lane by itself: one may be asked for many steps before the next is."""
        assert self._ahead
        if lane in self._asked_to and self._asked_to[lane] <= step + self._prefetch:
            self._ahead.forget(lane, before=step)
            for ahead in range(max(step, self._asked_to[lane]), step + self._prefetch + 1):
                self._ask(lane, ahead)

    def _ask(self, lane: int, step: int) -> None:
        assert self._ahead
        ids = self._dealer.ids(step, lane)
        if len(ids):
            self._ahead.ask((step, lane), ids)
        self._asked_to[lane] = step + 1


def evaluation(
    source: Source,
    ids: Ids,
    *,
    chunk: int,
    chunks: Iterable[int],
    transform: Callable[[Batch], Batch] | None = None,
    loader: Loader | None = None,
    seed: int = 0,
) -> Iterator[tuple[int, Batch]]:
    """These chunks of the samples, with their numbers: chunk c is ids[c·chunk : (c+1)·chunk]."""
    loader = loader or Loader()
    recipe = Recipe(source, seed, EVALUATION, transform)
    ahead = open_ahead(recipe, loader)
    wanted = ((c, ids[c * chunk : (c + 1) * chunk]) for c in chunks if c * chunk < len(ids))
    if ahead is None:
        yield from ((c, recipe.make((c,), part)) for c, part in wanted)
        return
    with closing(ahead):
        asked: deque[int] = deque()
        for c, part in wanted:
            ahead.ask((c,), part)
            asked.append(c)
            if len(asked) > loader.prefetch:
                yield _next(ahead, asked)
        while asked:
            yield _next(ahead, asked)


def _next(ahead: Ahead, asked: deque[int]) -> tuple[int, Batch]:
    c = asked.popleft()
    batch = ahead.answer((c,))
    assert batch is not None
    return c, batch
