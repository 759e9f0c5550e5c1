"""The display of a run: live in a terminal, plain lines elsewhere, JSON rows for scripts."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shoal.events import Event, RunState
from shoal.events.schema import to_row
from shoal.spec.run_paths import RunPaths
from shoal.terminal import formatting, servers
from shoal.terminal.console import json_line
from shoal.terminal.fact_table import GAP, fact_table, fitting
from shoal.terminal.notes import event_line

LINE_INTERVAL_S = 2.0
MAX_WORKERS_SHOWN = 16
LEAST_BAR, MOST_BAR = 8, 36
STAGES = {
    "importing": "importing torch and the job's packages",
    "opening data": "opening the data and building the model",
    "first batch": "computing the first batch",
}
"""What happens before the first step, as `RunState.stage` names it."""
GONE = ("dead", "left", "finished", "failed")


class Display(Protocol):
    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def on_event(self, paths: RunPaths, event: Event, state: RunState) -> None:
        """Called for every event of every run."""


def make_display(console: Console, *, as_json: bool, quiet: bool = False) -> Display:
    if as_json:
        return JsonDisplay()
    if quiet:
        return SilentDisplay()
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)


class SilentDisplay:
    """Shows nothing."""

    def __enter__(self) -> SilentDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def on_event(self, paths: RunPaths, event: Event, state: RunState) -> None:
        pass


class JsonDisplay(SilentDisplay):
    """Every event as a line of JSON on standard output."""

    def on_event(self, paths: RunPaths, event: Event, state: RunState) -> None:
        print(json_line({"run": paths.name, **to_row(event)}), flush=True)


class RateLimiter:
    """Allows one line per run and kind every `every_s`: evaluations of short epochs would flood the screen."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._last: dict[tuple[Path, str], float] = {}

    def allows(self, paths: RunPaths, kind: str) -> bool:
        now = time.monotonic()
        if now - self._last.get((paths.root, kind), -self._every_s) < self._every_s:
            return False
        self._last[paths.root, kind] = now
        return True


class PlainDisplay(SilentDisplay):
    """For logs and pipes: a line for each important event, and a progress line every two seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rate_limiter = RateLimiter(LINE_INTERVAL_S)
        self._stages: dict[Path, str] = {}

    def on_event(self, paths: RunPaths, event: Event, state: RunState) -> None:
        if self._stages.get(paths.root, "") != state.stage:
            self._stages[paths.root] = state.stage
            self._print(paths, STAGES.get(state.stage, ""))
        if event.kind in ("step", "evaluated") and not self._rate_limiter.allows(paths, event.kind):
            return
        self._print(paths, progress_line(state) if event.kind == "step" else event_line(event, state))

    def _print(self, paths: RunPaths, text: str) -> None:
        if text:
            name = paths.name if paths.parent_run is paths else f"{paths.parent_run.name}/{paths.name}"
            self._console.print(f"{name}: {text}", soft_wrap=True)


def progress_line(p: RunState) -> str:
    loss, speed = formatting.number(p.loss), formatting.count(p.samples_per_s)
    return (
        f"step {p.step}/{p.steps_total}  epoch {p.epoch:.2f}  loss {loss}  {speed} samples/s  "
        f"ETA {formatting.remaining(p.eta_s)}"
    )


class LiveDisplay:
    """Bar, loss, metrics, speed, and one line per worker; notes scroll above."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._states: dict[str, RunState] = {}
        self._stepped: dict[str, float] = {}
        self._rate_limiter = RateLimiter(LINE_INTERVAL_S)
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=8, transient=False)

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def on_event(self, paths: RunPaths, event: Event, state: RunState) -> None:
        self._states[paths.name] = state
        if event.kind == "step":
            self._stepped[state.run] = time.monotonic()
        quiet = event.kind == "evaluated" and not self._rate_limiter.allows(paths, event.kind)
        text = "" if quiet else event_line(event, state)
        if text:
            is_command = event.kind == "run_started"  # one line, so that it can be copied
            self._live.console.print(Text(f"{paths.name}: ", style="dim") + Text(text), soft_wrap=is_command)
        if event.kind in ("run_ended", "finished"):
            self._live.refresh()

    def _render(self) -> Group:
        shown = [p for p in self._states.values() if p.status in ("starting", "training")]
        now, width = time.monotonic(), self._console.width
        shown = shown or list(self._states.values())[-1:]
        return Group(*(_panel(p, width, since_s=now - self._stepped.get(p.run, now)) for p in shown))


def _panel(p: RunState, width: int = 120, *, since_s: float = 0.0) -> Table:
    """What fits into `width` columns; no line wraps. `since_s`: the time since the last step was told."""
    whole = Table.grid()
    whole.add_column(no_wrap=True, overflow="ellipsis")
    whole.add_row(Text(_stage_line(p, width)) if p.stage in STAGES else _progress_row(p, width, since_s))
    if p.metrics:
        whole.add_row(Text("  " + formatting.metrics(p.metrics), style="cyan"))
    whole.add_row(_worker_table(p, width))
    if p.servers:
        whole.add_row(Text("  " + servers.summary(p), style="dim"))
        whole.add_row(servers.server_table(p, width))
    return whole


def _short_name(p: RunState, width: int) -> str:
    return p.run if len(p.run) <= width // 3 else p.run[: width // 3 - 1] + "…"


def _stage_line(p: RunState, width: int) -> str:
    """What a run does before its first step: in full, or in the stage's own words."""
    name = _short_name(p, width)
    long = f"{name}  {STAGES[p.stage]}"
    return long if len(long) <= width else f"{name}  {p.stage}"


def _progress_row(p: RunState, width: int, since_s: float) -> Table:
    """The run's name, a bar, and facts; the least important ones are left out if there is no room."""
    name = _short_name(p, width)
    eta_s = None if p.eta_s is None else p.eta_s - since_s
    facts = {
        "step": f"{p.step}/{p.steps_total or '?'}",
        "epoch": f"epoch {p.epoch:.2f}",
        "loss": f"loss {formatting.number(p.loss)}",
        "speed": f"{formatting.count(p.samples_per_s)} samples/s",
        "eta": f"ETA {formatting.remaining(eta_s)}",
    }
    shown = fitting(facts, width - len(name) - GAP - LEAST_BAR, drop=("epoch", "speed", "loss", "eta"))
    room = width - len(name) - sum(len(text) + GAP for text in shown.values()) - GAP
    table = Table.grid(padding=(0, GAP), expand=False)
    for _ in range(2 + len(shown)):
        table.add_column(no_wrap=True)
    bar = ProgressBar(
        total=max(p.steps_total, 1), completed=p.step, width=max(4, min(MOST_BAR, room)), pulse=not p.steps_total
    )
    table.add_row(Text(name, style="bold"), bar, *shown.values())
    return table


def _worker_table(p: RunState, width: int) -> Table:
    """One row for each worker that is there, up to `MAX_WORKERS_SHOWN`."""
    here = [worker for worker in p.workers.values() if worker.state not in GONE]
    rows = []
    for worker in here[:MAX_WORKERS_SHOWN]:
        is_training = worker.state == "training"
        rows.append(
            {
                "name": worker.name,
                "state": worker.state,
                "lanes": f"lanes {_ranges(worker.lanes)}" if is_training else "",
                "step": f"step {worker.step}",
                "speed": f"{formatting.count(worker.samples_per_s)} samples/s" if worker.samples_per_s else "",
                "saves": "saves" if worker.is_saver and is_training and len(here) > 1 else "",
                "host": worker.host,
            }
        )
    more = f"and {len(here) - MAX_WORKERS_SHOWN} more" if len(here) > MAX_WORKERS_SHOWN else ""
    return fact_table(rows, width, drop=("saves", "host", "speed", "lanes"), more=more)


def _ranges(lanes: list[int]) -> str:
    """0-3,6 for [0, 1, 2, 3, 6]."""
    runs: list[list[int]] = []
    for lane in sorted(lanes):
        if runs and lane == runs[-1][1] + 1:
            runs[-1][1] = lane
        else:
            runs.append([lane, lane])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
