"""How the loop tells what happened: to the run's stream, and to the watchers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from shoal.errors import ShoalError, error
from shoal.events import Event, Stream
from shoal.events.picture import TIMES

ROW_EVERY_S = 0.05


class Teller:
    """Stream and watchers behind one verb. `stop` holds the first reason that a watcher gave.

    What all workers come to know alike (a result of an evaluation, say) is written by the one that `leads`. Watchers
    see it in every worker, so that they remember and decide the same, whoever dies; those that say `alone = True`
    (they write somewhere) are called only where this worker leads.
    """

    def __init__(self, stream: Stream, watchers: Sequence[Any] = ()) -> None:
        self.stream = stream
        self.watchers = list(watchers)
        self.leads = True
        self.stop = ""

    def tell(self, kind: str, /, *, step: int | None = None, **fields: Any) -> Event:
        """What this worker has to say."""
        event = self.stream.emit(kind, step=step, **fields)
        self.show(event)
        return event

    def tell_once(self, kind: str, /, *, step: int | None = None, **fields: Any) -> Event:
        """What every worker knows, and one says."""
        if self.leads:
            return self.tell(kind, step=step, **fields)
        event = Event(kind, time.time(), self.stream.who, step, fields)
        self.show(event)
        return event

    def show(self, event: Event) -> None:
        for watcher in self.watchers:
            if not self.leads and getattr(watcher, "alone", False):
                continue
            try:
                reason = watcher.watch(event)
            except ShoalError:
                raise
            except Exception as failure:
                name = type(watcher).__name__
                raise error("SH410", f"{name}: {type(failure).__name__}: {failure}", where=f"watch {name}") from failure
            if reason and not self.stop:
                self.stop = str(reason)

    def state(self) -> list[Any]:
        return [w.state() if hasattr(w, "state") else None for w in self.watchers]

    def load_state(self, states: Sequence[Any]) -> None:
        for watcher, state in zip(self.watchers, states, strict=False):
            if state is not None and hasattr(watcher, "load_state"):
                watcher.load_state(state)


class Progress:
    """Adds up steps into rows of the stream: one per step, or one per 50 ms when steps are shorter.

    Watchers of the user's (`every_step`) see each step.
    """

    def __init__(self, teller: Teller, *, every_step: bool) -> None:
        self._teller = teller
        self._every_step = every_step
        self._times = dict.fromkeys(TIMES, 0.0)
        self._steps = self._samples = self._bytes = self._plain = 0
        self._inner = 0
        self._row_at = time.perf_counter()

    def spent(self, name: str, seconds: float) -> None:
        self._times[name] += seconds

    def computed(self, samples: int) -> None:
        """By this worker."""
        self._samples += samples

    def sent(self, size_bytes: int, plain_bytes: int | None = None) -> None:
        """Without a codec, `plain_bytes` would have been sent."""
        self._bytes += size_bytes
        self._plain += size_bytes if plain_bytes is None else plain_bytes

    def inner(self, step: int, *, loss: float, lr: float, row: bool = True) -> None:
        """This worker has made a step by itself, which the next commit will count among others. Without `row` the next
        one tells of it."""
        self._inner += 1
        if row:
            self._add(step, loss, lr, inner=True)
        else:
            self._steps += 1

    def step(self, step: int, *, loss: float, lr: float, samples: int) -> None:
        """`step` steps are committed now; the last commit had so many samples in all."""
        self.show(step, loss=loss, lr=lr, samples=samples)
        if self._inner:
            self._inner = 0
            self._row(step, loss, lr, time.perf_counter())
        else:
            self._add(step, loss, lr)

    def _add(self, step: int, loss: float, lr: float, **facts: bool) -> None:
        self._steps += 1
        now = time.perf_counter()
        if now - self._row_at >= ROW_EVERY_S:
            self._row(step, loss, lr, now, **facts)

    def show(self, step: int, *, loss: float, lr: float, samples: int) -> None:
        """A step to those watchers that see each one."""
        if self._every_step:
            fields = {"loss": loss, "lr": lr, "samples": samples}
            self._teller.show(Event("step", time.time(), self._teller.stream.who, step, fields))

    def flush(self, step: int, *, loss: float, lr: float) -> None:
        """Before anything that a reader must see in order."""
        if self._steps:
            self._row(step, loss, lr, time.perf_counter())

    def restart(self) -> None:
        """The clock of the next row starts now: what came in between was not training."""
        self._row_at = time.perf_counter()

    def _row(self, step: int, loss: float, lr: float, now: float, **facts: bool) -> None:
        times = {name: round(value, 6) for name, value in self._times.items() if value}
        self._teller.stream.emit(
            "step",
            step=step,
            steps=self._steps,
            loss=loss,
            lr=lr,
            samples=self._samples,
            wall_s=round(now - self._row_at, 6),
            bytes_sent=self._bytes,
            bytes_plain=self._plain,
            **times,
            **facts,
        )
        self._times = dict.fromkeys(TIMES, 0.0)
        self._steps = self._samples = self._bytes = self._plain = 0
        self._row_at = now
