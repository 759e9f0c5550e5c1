"""Follows a run for its driver: memory that runs out, logs that grow, and the rules of `alerts`."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

from shoal.events import Event, EventWriter, RunState
from shoal.fleet.process_limits import LogLimit
from shoal.jobs.alerts.sender import AlertSender
from shoal.plan.alerts import AlertJudge, RaisedAlert
from shoal.plan.disk_forecast import DiskForecast, duration
from shoal.plan.memory_forecast import MemoryWatch
from shoal.spec.job import Job
from shoal.spec.run_paths import RunPaths

LOOK_EVERY_S = 5.0
TELL_S = 3 * 3600.0
"""A disk that is full sooner than this is told of, also without a rule."""


class RunWatch:
    """Belongs to the driver's thread. `observe` takes every event, `tick` is called often."""

    def __init__(self, job: Job, paths: RunPaths, stream: EventWriter) -> None:
        self._paths, self._stream = paths, stream
        self._judge = AlertJudge(job.alerts, progress_s=time.monotonic())
        self._memory = MemoryWatch()
        self._disk = DiskForecast()
        self._logs = LogLimit(paths, job.limits.log_bytes)
        self._told_of_disk = False
        self._sender = AlertSender()
        self._looked_s = time.monotonic()

    def observe(self, event: Event) -> None:
        now = time.monotonic()
        self._tell(self._judge.observe(event, now))
        if event.kind == "usage":
            told = self._memory.observe(
                event["worker"], event.t, rss_bytes=event["rss_bytes"], room_bytes=event["room_bytes"]
            )
            if told:
                self._stream.emit("note", message=told)
                self._tell(self._judge.memory(event["worker"], told, now))
        if event.kind in ("worker_died", "left"):
            worker = event.get("worker", event.who)
            used = self._memory.forget(worker)
            if used and event.get("reason", "").startswith("SIGKILL"):
                self._stream.emit("note", message=f"{worker} was killed: when it told last, {used}")

    def tick(self, state: RunState) -> None:
        for problem in self._sender.take_failures():
            self._stream.emit("note", message=problem)
        now = time.monotonic()
        if now - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now
        for told in self._logs.enforce():
            self._stream.emit("note", message=told)
        work_s = {one.name: one.step_work_s or 0.0 for one in state.training_workers}
        free_bytes = _free_bytes(self._paths)
        full_in_s = self._forecast(now, free_bytes)
        self._tell(self._judge.look(now, work_s=work_s, free_bytes=free_bytes, full_in_s=full_in_s))

    def _forecast(self, now: float, free_bytes: int | None) -> float | None:
        """When the disk will be full. A note of the run tells it once, and again after the danger was over."""
        if free_bytes is None:
            return None
        self._disk.observe(now, free_bytes)
        full_in_s = self._disk.full_in_s()
        is_soon = full_in_s is not None and full_in_s < TELL_S
        if is_soon and full_in_s is not None and not self._told_of_disk:
            self._stream.emit("note", message=f"the disk of the run is full in {duration(full_in_s)} if this goes on")
        self._told_of_disk = is_soon
        return full_in_s

    def end(self, status: str, why: str) -> None:
        self._tell(self._judge.end(status, why, time.monotonic()))

    def close(self) -> None:
        """Wait some seconds for alerts that are being sent."""
        self._sender.close()
        for problem in self._sender.take_failures():
            self._stream.emit("note", message=problem)

    def _tell(self, raised: Sequence[RaisedAlert]) -> None:
        for one in raised:
            self._stream.emit("alert", when=one.rule.when, text=one.text, about=one.about)
            text = f"{self._paths.name}: {one.text}"
            content = {"run": self._paths.name, "when": one.rule.when, "about": one.about, "t": time.time()}
            self._sender.send(one.rule, {**content, "text": text, "content": text})


def _free_bytes(paths: RunPaths) -> int | None:
    with contextlib.suppress(OSError):
        found = os.statvfs(paths.root)
        return found.f_bavail * found.f_frsize
    return None
