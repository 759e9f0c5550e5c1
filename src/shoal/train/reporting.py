"""Reports what happens in the loop to the run's event stream and to the watchers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from shoal.events import Event, EventWriter
from shoal.events.run_state import TIME_FIELDS
from shoal.spec.resolve import is_users_failure, user_error

EMIT_EVERY_S = 0.05


class Reporter:
    """Writes events to the stream and shows them to the watchers. `stop_reason` is the first reason that a watcher
    gave.

    The leader alone writes an event that is the same on every worker, for example the result of an evaluation. Watchers
    see it on every worker, so that they reach the same decisions whichever worker dies. A watcher with `alone = True`
    has output of its own: only the leader calls it.
    """

    def __init__(self, stream: EventWriter, watchers: Sequence[Any] = ()) -> None:
        self.stream = stream
        self.watchers = list(watchers)
        self.is_leader = True
        self.stop_reason = ""

    def report(self, kind: str, /, *, step: int | None = None, **fields: Any) -> Event:
        """Report an event of this worker."""
        event = self.stream.emit(kind, step=step, **fields)
        self.notify_watchers(event)
        return event

    def report_from_leader(self, kind: str, /, *, step: int | None = None, **fields: Any) -> Event:
        """Report an event that is the same on every worker. Only the leader writes it."""
        if self.is_leader:
            return self.report(kind, step=step, **fields)
        event = Event(kind, time.time(), self.stream.who, step, fields)
        self.notify_watchers(event)
        return event

    def notify_watchers(self, event: Event, watchers: Sequence[Any] | None = None) -> None:
        """Show the event to all watchers, or to these."""
        for watcher in self.watchers if watchers is None else watchers:
            if not self.is_leader and getattr(watcher, "alone", False):
                continue
            try:
                reason = watcher.watch(event)
            except BaseException as failure:
                if not is_users_failure(failure):
                    raise
                name = type(watcher).__name__
                raise user_error("SH410", failure, name, place=f"watcher {name}") from failure
            if reason and not self.stop_reason:
                self.stop_reason = str(reason)

    def state(self) -> list[Any]:
        return [w.state() if hasattr(w, "state") else None for w in self.watchers]

    def load_state(self, states: Sequence[Any]) -> None:
        for watcher, state in zip(self.watchers, states, strict=False):
            if state is not None and hasattr(watcher, "load_state"):
                watcher.load_state(state)


class StepStats:
    """Adds up steps into rows of the stream: one per step, or one per 50 ms when steps are shorter.

    With `every_step`, the watchers see each step.
    """

    def __init__(self, reporter: Reporter, *, every_step: bool) -> None:
        self._reporter = reporter
        self._every_step = every_step
        self._times = dict.fromkeys(TIME_FIELDS, 0.0)
        self._steps = self._samples = self._sent_bytes = self._plain_bytes = 0
        self._inner_steps = 0
        self._is_training = False
        self._emitted_at = time.perf_counter()

    def add_time(self, name: str, seconds: float) -> None:
        """Count time since the worker joined. Time before that is start-up, whatever the worker did."""
        if self._is_training:
            self._times[name] += seconds

    def add_samples(self, samples: int) -> None:
        """Count samples that this worker computed."""
        self._samples += samples

    def add_bytes(self, size_bytes: int, plain_bytes: int | None = None) -> None:
        """`plain_bytes` is what would have been sent without a codec."""
        self._sent_bytes += size_bytes
        self._plain_bytes += size_bytes if plain_bytes is None else plain_bytes

    def record_inner_step(self, step: int, *, loss: float, lr: float, emit: bool = True) -> None:
        """Count a local step, which is part of the next commit. Without `emit`, the next row includes it."""
        self._inner_steps += 1
        if emit:
            self._count_step(step, loss, lr, inner=True)
        else:
            self._steps += 1

    def record_step(self, step: int, *, loss: float, lr: float, samples: int) -> None:
        """Count the commit that leads to `step`. `samples` is its number of samples over all lanes."""
        self.notify_watchers(step, loss=loss, lr=lr, samples=samples)
        if self._inner_steps:
            self._inner_steps = 0
            self._emit(step, loss, lr, time.perf_counter())
        else:
            self._count_step(step, loss, lr)

    def _count_step(self, step: int, loss: float, lr: float, **facts: bool) -> None:
        self._steps += 1
        now = time.perf_counter()
        if now - self._emitted_at >= EMIT_EVERY_S:
            self._emit(step, loss, lr, now, **facts)

    def notify_watchers(self, step: int, *, loss: float, lr: float, samples: int) -> None:
        """Show the step to the watchers, if they see each one."""
        if self._every_step:
            fields = {"loss": loss, "lr": lr, "samples": samples}
            self._reporter.notify_watchers(Event("step", time.time(), self._reporter.stream.who, step, fields))

    def flush(self, step: int, *, loss: float, lr: float) -> None:
        """Emit the row so far, before any event that must follow it in the stream."""
        if self._steps:
            self._emit(step, loss, lr, time.perf_counter())

    def restart_clock(self) -> None:
        """Start the clock of the next row now: the time since the last row was not training."""
        self._is_training = True
        self._emitted_at = time.perf_counter()

    def _emit(self, step: int, loss: float, lr: float, now: float, **facts: bool) -> None:
        times = {name: round(value, 6) for name, value in self._times.items() if value}
        self._reporter.stream.emit(
            "step",
            step=step,
            steps=self._steps,
            loss=loss,
            lr=lr,
            samples=self._samples,
            wall_s=round(now - self._emitted_at, 6),
            bytes_sent=self._sent_bytes,
            bytes_plain=self._plain_bytes,
            **times,
            **facts,
        )
        self._times = dict.fromkeys(TIME_FIELDS, 0.0)
        self._steps = self._samples = self._sent_bytes = self._plain_bytes = 0
        self._emitted_at = now
