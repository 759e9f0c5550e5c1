"""What a person sees while a run goes on: a live display in a terminal, plain lines elsewhere, rows for scripts."""

from __future__ import annotations

import ipaddress
import json
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shoal.events import Event, Picture
from shoal.spec.paths import RunPaths
from shoal.terminal import servers, words

PLAIN_EVERY_S = 2.0
MOST_WORKERS = 16
GONE = ("dead", "left", "finished", "failed")
_TOLD = {
    "saved",
    "step",
    "built",
    "joined",
    "link_measured",
    "stopped",
    "best",
    "worker_started",
    "server_started",
    "table",
    "served",
    "run_ended",
    "finished",
    "failed",
}


class Display(Protocol):
    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def look(self, paths: RunPaths, event: Event, picture: Picture) -> None:
        """Called for every event of every run."""


def display(console: Console, *, as_json: bool, quiet: bool = False) -> Display:
    if as_json:
        return Rows()
    if quiet:
        return Silent()
    return LiveDisplay(console) if console.is_terminal else Lines(console)


class Silent:
    """Shows nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def look(self, paths: RunPaths, event: Event, picture: Picture) -> None:
        pass


class Rows(Silent):
    """Every event as a line of JSON on standard output."""

    def look(self, paths: RunPaths, event: Event, picture: Picture) -> None:
        row = json.loads(event.to_line())
        sys.stdout.write(json.dumps({"run": paths.name, **row}) + "\n")
        sys.stdout.flush()


def remark(event: Event, picture: Picture) -> str:
    """What is worth a line of its own; '' for the rest."""
    if event.kind == "built" and event.who == picture.built_by:
        parts = ", ".join(f"{words.count(n)} {name}" for name, n in event["samples"].items())
        skipped = f", {event['skipped']} bad rows skipped" if event["skipped"] else ""
        known = event.get("parameters")  # not where a model is never whole
        return (
            f"{f'{words.count(known)} parameters, ' if known else ''}samples: {parts}{skipped}; "
            f"{words.count(event['steps'])} steps, {event['lanes']} lanes, {event['device']}"
        )
    if event.kind == "evaluated" and not event.get("again"):
        name = "" if event["part"] == "validation" else f" on {event['part']}"
        return f"step {event.step}: evaluated{name}: {words.metrics(event['metrics'])}"
    if event.kind == "run_started":
        return how_to_join(str(event["run"]), str(event.get("listens", "")), tls=bool(event.get("tls")))
    if event.kind == "printed":
        return str(event["text"])
    if event.kind == "view":
        return "" if event["why"] == "finished" else str(event["why"])
    if event.kind == "left":
        return "" if event["why"] == "finished" else f"{event.who} left at step {event.step} ({event['why']})"
    if event.kind == "note" and picture.echo:
        return ""
    if event.kind in _TOLD or event.get("again") or (event.kind == "servers_wanted" and not event["why"]):
        return ""
    return picture.notes[-1] if picture.notes else ""


def how_to_join(run: str, address: str, *, tls: bool = False) -> str:
    """Where others may join, and how; '' where nobody else can reach the run."""
    host = address.rpartition(":")[0].strip("[]")
    if not host or host == "localhost" or ipaddress.ip_address(host).is_loopback:
        return ""
    return f"join with: SHOAL_TOKEN=$(shoal token {run}) shoal join {address}" + (" --tls DIR" if tls else "")


class Pace:
    """Says whether it is time again: evaluations of short epochs would flood the screen."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._last: dict[tuple[Path, str], float] = {}

    def allows(self, paths: RunPaths, kind: str) -> bool:
        now = time.monotonic()
        if now - self._last.get((paths.root, kind), -self._every_s) < self._every_s:
            return False
        self._last[paths.root, kind] = now
        return True


class Lines(Silent):
    """For logs and pipes: a line for what matters, and one every two seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pace = Pace(PLAIN_EVERY_S)

    def look(self, paths: RunPaths, event: Event, picture: Picture) -> None:
        if event.kind in ("step", "evaluated") and not self._pace.allows(paths, event.kind):
            return
        text = progress(picture) if event.kind == "step" else remark(event, picture)
        if text:
            name = paths.name if paths.whole is paths else f"{paths.whole.name}/{paths.name}"
            self._console.print(f"{name}: {text}", highlight=False, markup=False, soft_wrap=True)


def progress(p: Picture) -> str:
    loss, speed = words.number(p.loss), words.count(p.samples_per_s)
    return (
        f"step {p.step}/{p.steps_total}  epoch {p.epoch:.2f}  loss {loss}  {speed} samples/s  "
        f"ETA {words.seconds(p.eta_s)}"
    )


class LiveDisplay:
    """Bar, loss, metrics, speed, and one line per worker; remarks scroll above."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pictures: dict[str, Picture] = {}
        self._pace = Pace(PLAIN_EVERY_S)
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=8, transient=False)

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def look(self, paths: RunPaths, event: Event, picture: Picture) -> None:
        self._pictures[paths.name] = picture
        quiet = event.kind == "evaluated" and not self._pace.allows(paths, event.kind)
        text = "" if quiet else remark(event, picture)
        if text:
            self._live.console.print(Text(f"{paths.name}: ", style="dim") + Text(text), soft_wrap=True)
        if event.kind in ("run_ended", "finished"):
            self._live.refresh()

    def _render(self) -> Group:
        shown = [p for p in self._pictures.values() if p.status in ("starting", "training")]
        return Group(*(_panel(p) for p in shown or list(self._pictures.values())[-1:]))


def _panel(p: Picture) -> Table:
    table = Table.grid(padding=(0, 2), expand=False)
    bar = ProgressBar(total=max(p.steps_total, 1), completed=p.step, width=36, pulse=not p.steps_total)
    table.add_row(
        Text(p.run, style="bold"),
        bar,
        f"{p.step}/{p.steps_total or '?'}",
        f"epoch {p.epoch:.2f}",
        f"loss {words.number(p.loss)}",
        f"{words.count(p.samples_per_s)} samples/s",
        f"ETA {words.seconds(p.eta_s)}",
    )
    whole = Table.grid()
    whole.add_row(table)
    if p.metrics:
        whole.add_row(Text("  " + words.metrics(p.metrics), style="cyan"))
    whole.add_row(_crew(p))
    if p.servers:
        whole.add_row(Text("  " + servers.summary(p), style="dim"))
        whole.add_row(servers.lines(p))
    return whole


def _crew(p: Picture) -> Table:
    """Who is there, and how many were."""
    table = Table.grid(padding=(0, 2), pad_edge=True)
    here = [worker for worker in p.workers.values() if worker.state not in GONE]
    for worker in here[:MOST_WORKERS]:
        lanes = f"lanes {_ranges(worker.lanes)}" if worker.state == "training" else ""
        speed = f"{words.count(worker.samples_per_s)} samples/s" if worker.samples_per_s else ""
        saves = "saves" if worker.saves and worker.state == "training" and len(here) > 1 else ""
        table.add_row(worker.name, worker.state, lanes, f"step {worker.step}", speed, saves, worker.host, style="dim")
    if len(here) > MOST_WORKERS:
        table.add_row(f"and {len(here) - MOST_WORKERS} more", style="dim")
    return table


def _ranges(lanes: list[int]) -> str:
    """0-3,6 for [0, 1, 2, 3, 6]."""
    runs: list[list[int]] = []
    for lane in sorted(lanes):
        if runs and lane == runs[-1][1] + 1:
            runs[-1][1] = lane
        else:
            runs.append([lane, lane])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
