"""Honest fakes for the loops: a strategy whose weights are one number, a stream and a store that remember."""

from types import SimpleNamespace

import torch

from shoal.collectives.outcome import Committed, Discarded
from shoal.events import Event
from shoal.fleet.membership import InMemoryMembership
from shoal.spec.job import MonitorConfig
from shoal.spec.view import View, step_of
from shoal.strategies.base import FinalModel, Traits
from shoal.train.activity import Activity
from shoal.train.loop import Loop, TrainSchedule
from shoal.train.progress import Progress
from shoal.train.reporting import Reporter, StepStats
from shoal.train.watchers import BestMetric


class FakeStrategy:
    """Each commit adds 1 to the weight. `calls` are the verbs in order; `lost[verb]` says why that verb is discarded
    next time, or is called instead."""

    lr, is_saved = 0.1, False

    def __init__(self, progress, store, *, exact=True, lockstep=True):
        self.traits = Traits(exact, lockstep)
        self.progress, self.store, self.weight, self.calls, self.lost = progress, store, 0, [], {}
        self.metrics, self.entries, self.aborted = {"loss": 1.0}, [], []

    def _call(self, verb):
        self.calls.append(verb)
        why = self.lost.pop(verb, None)
        return why() if callable(why) else Discarded(why) if why else None

    def enter(self, view, seat):
        if discarded := self._call("enter"):
            return discarded
        self.weight = self.progress.step = step_of(view.position)
        self.progress.has_state = True
        return None

    def follow(self, view, seat):
        self._call("follow")
        for step in self.entries:
            self.weight = self.progress.step = step
            self.progress.has_state = True
            yield step == self.entries[-1]

    def run_step(self, must_halt):
        halt = must_halt()
        if discarded := self._call("step"):
            return discarded
        self.weight += 1
        committed = Committed(torch.tensor(1.0 / self.weight), halt=halt)
        self.progress.record_commit(committed, step=self.progress.step + 1, lr=self.lr)
        return committed

    def leave_view(self):
        return self._call("leave_view")

    def evaluate(self, split):
        return self._call(f"evaluate {split}") or dict(self.metrics)

    def adopt_metrics(self, metrics, monitored):
        self._call(f"adopt {monitored}")

    def save(self, *, force=False):
        self._call("save, forced" if force else "save")

    def save_alone(self):
        self._call("save_alone")
        self.store.saved = self.weight

    def restore(self):
        self._call("restore")
        self.progress.has_state = True
        if self.store.saved is not None:
            self.weight = self.progress.step = self.store.saved
        return self.store.saved

    def finish(self, conclude):
        if discarded := self._call("finish"):
            return discarded
        conclude(FinalModel(f"weights {self.weight}", "state", lambda target, **options: None))
        return None

    def hand_over(self, given_up):
        self._call("hand_over")

    def abort(self, view):
        self.aborted.append(view)


class RecordingStream:
    def __init__(self, who="worker-0"):
        self.who, self.events = who, []

    def emit(self, kind, /, *, step=None, **fields):
        self.events.append(Event(kind, 0.0, self.who, step, fields))
        return self.events[-1]

    def kinds(self):
        return [event.kind for event in self.events if event.kind != "step"]

    def of(self, kind):
        return [event for event in self.events if event.kind == kind]


class FakeStore:
    """`saved` is the weight in the newest checkpoint."""

    def __init__(self):
        self.saved, self.waited = None, 0

    def wait(self):
        self.waited += 1

    def latest(self):
        return None if self.saved is None else SimpleNamespace(step=self.saved)


class Bench:
    """A loop around a FakeStrategy, and everything that can be seen of it."""

    def __init__(self, *, steps=6, evaluate_every=3, splits=("validation",), watchers=(), keep_best=True, **traits):
        self.stream, self.store, self.membership = RecordingStream(), FakeStore(), InMemoryMembership()
        self.best = BestMetric(MonitorConfig(metric="loss"))
        self.reporter = Reporter(self.stream, [self.best, *watchers])
        self.activity = Activity()
        self.progress = Progress(
            sampler=SimpleNamespace(batch_samples=lambda step: 10),
            task=SimpleNamespace(state=lambda: None, load_state=lambda state: None),
            reporter=self.reporter,
            stats=StepStats(self.reporter, every_step=True),
            activity=self.activity,
            best=self.best,
            has_state=True,
        )
        self.strategy = FakeStrategy(self.progress, self.store, **traits)
        self.concluded, self.leave_reason = [], ""
        self.loop = Loop(
            TrainSchedule(steps, evaluate_every, keep_best=keep_best),
            strategy=self.strategy,
            progress=self.progress,
            splits={name: name for name in splits},
            store=self.store,
            membership=self.membership,
            conclude=self.concluded.append,
            leave_reason=lambda: self.leave_reason,
        )

    def view(self, number=1, carries=None, **fields):
        return View(number=number, carries=carries or {0: [0, 1], 1: [2, 3]}, **({"saver": 0} | fields))

    def publish(self, **fields):
        self.membership.publish(self.view(**fields))
