"""Which rules of `alerts` speak now. Pure: facts come in, sentences come out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.events import Event
from shoal.plan.disk_forecast import duration
from shoal.plan.memory_forecast import size
from shoal.plan.stragglers import slowest_worker
from shoal.spec.alerts.config import AlertConfig

PROGRESS = ("step", "evaluated", "saved")
"""Events that show that a run is not stalled, if their step is a new one: workers that die again and again make views
without end, and repeat the steps after a checkpoint."""


@dataclass(frozen=True)
class RaisedAlert:
    """A rule that speaks. `about`: the worker or metric, or ''."""

    rule: AlertConfig
    text: str
    about: str = ""


@dataclass
class AlertJudge:
    """The rules of one run, and when each spoke last. Times are of a clock that cannot be set."""

    rules: Sequence[AlertConfig]
    progress_s: float = 0.0
    _furthest: dict[str, int] = field(default_factory=dict)
    _spoke_s: dict[tuple[int, str], float] = field(default_factory=dict)

    def observe(self, event: Event, now_s: float) -> list[RaisedAlert]:
        step = event.step or 0
        if event.kind in PROGRESS and step > self._furthest.get(event.kind, -1):
            self._furthest[event.kind], self.progress_s = step, now_s
        if event.kind == "step":
            return self._judge_loss(event, now_s)
        if event.kind == "failed" and event["code"] == "SH403":  # a worker stops before it reports such a step
            return self._speak("nan", event["message"], now_s, about="loss")
        return self._judge_metrics(event, now_s) if event.kind == "evaluated" else []

    def _judge_loss(self, event: Event, now_s: float) -> list[RaisedAlert]:
        loss = event.get("loss")
        if not isinstance(loss, float) or math.isfinite(loss):
            return []
        return self._speak("nan", f"the training loss is {loss} at step {event.step}", now_s, about="loss")

    def _judge_metrics(self, event: Event, now_s: float) -> list[RaisedAlert]:
        prefix = "" if event["split"] == "validation" else f"{event['split']}/"
        raised: list[RaisedAlert] = []
        for name, value in event["metrics"].items():
            told = f"{prefix}{name} is {value:g} at step {event.step}"
            if not math.isfinite(value):
                raised += self._speak("nan", told, now_s, about=name)
            for rule in self.rules:
                if rule.when == "metric" and rule.metric in (prefix + name, f"{event['split']}/{name}"):
                    raised += self._speak_if(rule, breaks(rule, value), f"{told}, {bounds(rule)}", now_s, about=name)
        return raised

    def memory(self, worker: str, text: str, now_s: float) -> list[RaisedAlert]:
        return self._speak("memory", text, now_s, about=worker)

    def look(
        self, now_s: float, *, work_s: Mapping[str, float], free_bytes: int | None, full_in_s: float | None = None
    ) -> list[RaisedAlert]:
        """What only time shows. `work_s`: seconds of work per step by worker that trains. `full_in_s`: when the disk
        will be full; None if it does not fill."""
        raised: list[RaisedAlert] = []
        slowest = slowest_worker(work_s)
        for rule in self.rules:
            if rule.when == "stalled":
                silent_s = now_s - self.progress_s
                told = f"no new step, evaluation or save for {silent_s:.0f} s"
                raised += self._speak_if(rule, silent_s >= rule.stalled_after_s, told, now_s)
            elif rule.when == "straggler" and slowest is not None:
                name, share = slowest
                told = f"{name} holds the others back: they need {share:.0%} less time for a step"
                raised += self._speak_if(rule, share >= rule.straggler_share, told, now_s, about=name)
            elif rule.when == "disk" and free_bytes is not None:
                is_soon = full_in_s is not None and rule.hours is not None and full_in_s < 3600 * rule.hours
                told = f"{size(free_bytes)} are free on the disk of the run"
                told += f"; it is full in {duration(full_in_s)}" if full_in_s is not None else ""
                raised += self._speak_if(rule, is_soon or free_bytes < rule.free_bytes, told, now_s)
        return raised

    def end(self, status: str, why: str, now_s: float) -> list[RaisedAlert]:
        if status == "finished":
            return self._speak("finished", "the run has finished", now_s)
        return self._speak("failed", f"the run failed: {why}", now_s) if status == "failed" else []

    def _speak(self, when: str, text: str, now_s: float, *, about: str = "") -> list[RaisedAlert]:
        own = [rule for rule in self.rules if rule.when == when]
        return [one for rule in own for one in self._speak_if(rule, True, text, now_s, about=about)]

    def _speak_if(
        self, rule: AlertConfig, holds: bool, text: str, now_s: float, *, about: str = ""
    ) -> list[RaisedAlert]:
        key = self.rules.index(rule), about
        before = self._spoke_s.get(key)
        if not holds or (before is not None and now_s - before < rule.cooldown_s):
            return []
        self._spoke_s[key] = now_s
        return [RaisedAlert(rule, text, about)]


def breaks(rule: AlertConfig, value: float) -> bool:
    return (rule.above is not None and value > rule.above) or (rule.below is not None and value < rule.below)


def bounds(rule: AlertConfig) -> str:
    told = [f"above {rule.above:g}"] if rule.above is not None else []
    return " or ".join([*told, *([f"below {rule.below:g}"] if rule.below is not None else [])])
