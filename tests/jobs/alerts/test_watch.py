"""What only time shows, through the watch of a run: each alert is an event, and a command gets it. The clock, the disk
and the workers are the test's."""

import json
import time
from types import SimpleNamespace

import pytest

from shoal.events import Event, EventWriter, read_events
from shoal.jobs.alerts import watch
from shoal.jobs.alerts.watch import LOOK_EVERY_S, TELL_S, RunWatch
from shoal.spec.alerts.config import AlertConfig
from shoal.spec.load import load_run_job
from tests.jobs.past_run import write_run

GB = 10**9
TB = 10**12


class Watched:
    """A run with these rules, each with a command that writes down what it gets."""

    def __init__(self, paths, rules, monkeypatch):
        self.paths, self.now_s, self.free_bytes = paths, 1000.0, TB
        self.workers = []
        (paths.root / "told").touch()
        monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: self.now_s, time=time.time))
        monkeypatch.setattr(watch, "os", SimpleNamespace(statvfs=self._statvfs))
        hooks = [["sh", "-c", f"(cat; echo) >> {paths.root / 'told'}"] for rule in rules]
        alerts = [AlertConfig(**rule, command=hook) for rule, hook in zip(rules, hooks, strict=True)]
        job = load_run_job(paths.job).model_copy(update={"alerts": alerts})
        paths.events.unlink()
        self.stream = EventWriter(paths.events, "driver", flush_s=0)
        self.watch = RunWatch(job, paths, self.stream)

    def _statvfs(self, path):
        assert path == self.paths.root
        return SimpleNamespace(f_bavail=self.free_bytes, f_frsize=1)

    def after(self, seconds, **events):
        """The driver looks again so much later."""
        self.now_s += seconds
        self.watch.tick(SimpleNamespace(training_workers=self.workers))

    def end(self):
        """Alerts and notes of the run, and what the commands got."""
        self.watch.close()
        self.stream.close()
        events = list(read_events(self.paths.events))
        told = [json.loads(line) for line in (self.paths.root / "told").read_text().splitlines()]
        alerts = [(one["when"], one["about"], one["text"]) for one in events if one.kind == "alert"]
        name = self.paths.name
        assert [(one["when"], one["about"], one["text"]) for one in told] == [
            (when, about, f"{name}: {text}") for when, about, text in alerts
        ]
        return alerts, [one["message"] for one in events if one.kind == "note"]


@pytest.fixture
def watched(tmp_path, monkeypatch):
    return lambda *rules: Watched(write_run(tmp_path / "mlp-1"), rules, monkeypatch)


def worker(name, step_s):
    return SimpleNamespace(name=name, step_work_s=step_s)


def test_a_run_that_stalls(watched):
    one = watched({"when": "stalled", "after_s": 60})
    one.after(50)
    one.watch.observe(Event("step", 1.0, "worker-0", 1, {"loss": 1.0}))
    one.after(59)
    one.after(LOOK_EVERY_S)
    one.after(LOOK_EVERY_S)  # once per cooldown
    assert one.end() == ([("stalled", "", "no new step, evaluation or save for 64 s")], [])


def test_a_worker_that_holds_the_others_back(watched):
    one = watched({"when": "straggler", "share": 0.4})
    one.workers = [worker("worker-0", 1.0), worker("worker-1", None)]
    one.after(LOOK_EVERY_S)  # it has made too few steps
    one.workers = [worker("worker-0", 1.0), worker("worker-1", 1.5)]
    one.after(LOOK_EVERY_S)
    one.workers[1] = worker("worker-1", 2.0)
    one.after(LOOK_EVERY_S - 1)  # too soon after the last look
    assert not one.paths.events.read_bytes()
    one.after(1)
    told = "worker-1 holds the others back: they need 50% less time for a step"
    assert one.end() == ([("straggler", "worker-1", told)], [])


def test_a_disk_with_little_room(watched):
    one = watched({"when": "disk", "free": "5 GB"})
    one.after(LOOK_EVERY_S)
    one.free_bytes = 4 * GB
    one.after(LOOK_EVERY_S)
    assert one.end() == ([("disk", "", "4.0 GB are free on the disk of the run")], [])


def test_a_disk_that_fills(watched):
    """By a GB a second: the note comes three hours before it is full, the rule two. The note comes again when the
    danger was over."""
    one = watched({"when": "disk", "hours": 2, "cooldown_s": 1e9})
    one.free_bytes, left_s = 12 * TB, []
    while one.free_bytes > 6 * TB:
        one.after(60)
        if b'"note"' not in one.paths.events.read_bytes():
            left_s.append(one.free_bytes / GB)
        one.free_bytes -= 60 * GB
    assert TELL_S - 60 <= left_s[-1] <= TELL_S + 60
    for free_bytes in (100 * TB, TB):
        one.free_bytes = free_bytes
        for _ in range(130):
            one.after(60)
    ((when, _, text),), notes = one.end()
    assert (when, text) == ("disk", "7140.0 GB are free on the disk of the run; it is full in 1 h 59 min")
    assert notes[0] == "the disk of the run is full in 2 h 59 min if this goes on"
    assert len(notes) == 2


def test_a_disk_that_cannot_be_asked_speaks_of_nothing(watched, monkeypatch):
    def refuse(path):
        raise OSError("stale")

    one = watched({"when": "disk", "hours": 2})
    monkeypatch.setattr(watch, "os", SimpleNamespace(statvfs=refuse))
    one.after(LOOK_EVERY_S)
    assert one.end() == ([], [])
