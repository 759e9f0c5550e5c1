"""python -m benchmarks.web.rivals: `shoal web` beside TensorBoard, MLflow and trackio, on the same data.

Each tool writes the same curves with its own writer, is started, and its page is opened in Chromium: seconds until the
name of a run is on the screen, and until a curve is; bytes that the browser received; memory of the server's processes
and of the page's scripts. `--install DIR` makes an environment with the other tools; `--tools DIR` uses it.

Everything is bounded: a tool has 4 minutes to write its data (the row says how far it came), and each page one minute
(`never` after that). A tool whose pages took more than two minutes in all is looked at once, else three times.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from tests.web.browser import open_browser

from benchmarks import report
from benchmarks.web.__main__ import make_run, steps

SCENES = {"runs": (10_000, 30), "points": (1, 1_000_000), "overlay": (100, 10_000)}
"""Runs, and points of each."""
QUICK = {"runs": (20, 30), "points": (1, 3_000), "overlay": (5, 100)}
SIDES = ("shoal", "tensorboard", "mlflow", "trackio")
WRITE_S = 240.0
PATIENCE_S = 60.0
"""For a server to listen, and for each of its pages."""
LOOKS_S = 120.0
"""No look begins later than this after the first one began."""
SEEN = ("start s", "first row s", "first curve s", "received MB", "server MB", "page heap MB")
FAILED = "failed"
TOOLS = ["tensorboard==2.21.0", "mlflow==3.17.2", "trackio==0.43.0", "setuptools<81"]
HAS_CURVE = """() => {
  const roots = [document];
  for (let n = 0; n < roots.length; n += 1)
    for (const one of roots[n].querySelectorAll("*")) {
      if (one.shadowRoot) roots.push(one.shadowRoot);
      if (one.tagName !== "CANVAS" && one.tagName.toLowerCase() !== "svg") continue;
      const box = one.getBoundingClientRect();
      const isDrawn = one.tagName === "CANVAS" || one.querySelector("path, polyline, line");
      if (box.width > 180 && box.height > 80 && isDrawn) return true;
    }
  return false;
}"""


@dataclass
class Side:
    """A started tool. `pages`: addresses of the list and of the curve."""

    process: subprocess.Popen[str]
    pages: Mapping[str, str] = field(default_factory=dict)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    @property
    def memory_mb(self) -> float | None:
        """Of all its processes; pages that they share count once (PSS). None if it has ended."""
        found = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    found += one.memory_full_info().pss / 1e6
        return found or None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.web.rivals", description=__doc__)
    report.take_names(parser, "scene", SCENES)
    parser.add_argument("--tools", type=Path, help="the environment of the other tools")
    parser.add_argument("--install", type=Path, metavar="DIR", help="make that environment, and end")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing is kept: does it work?")
    asked = parser.parse_args()
    if asked.install:
        subprocess.run([sys.executable, "-m", "venv", str(asked.install)], check=True)
        subprocess.run([str(asked.install / "bin" / "pip"), "install", "--quiet", *TOOLS], check=True)
        return
    for scene in asked.scenes or SCENES:
        runs, points = (QUICK if asked.quick else SCENES)[scene]
        rows: list[dict[str, Any]] = []
        for side in SIDES if asked.tools else SIDES[:1]:
            turns = 1 if asked.quick else asked.turns
            rows.append(measure(side, scene, runs, points, tools=asked.tools, turns=turns))
            if not asked.quick:
                report.keep("web", f"rivals {scene}", {"what": f"{runs} runs of {points} points", "rows": rows})
        Console().print(report.table(f"{scene}: {runs} runs of {points} points", rows))


def measure(name: str, scene: str, runs: int, points: int, *, tools: Path, turns: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix=f"shoal-rivals-{name}-", ignore_cleanup_errors=True) as scratch:
        directory = Path(scratch)
        began_s = time.monotonic()
        wrote = write(name, directory, runs, points, tools=tools)
        row: dict[str, Any] = {"tool": name, "wrote": wrote, "write s": round(time.monotonic() - began_s, 1)}
        began_s = time.monotonic()
        looks = [look(name, directory, scene, runs, tools=tools) if wrote != FAILED else dict.fromkeys(SEEN)]
        while len(looks) < turns and None not in looks[-1].values() and time.monotonic() - began_s < LOOKS_S:
            looks.append(look(name, directory, scene, runs, tools=tools))
    for key in SEEN:
        seen = [value for one in looks if (value := one[key]) is not None]
        row[key] = round(statistics.median(seen), 2) if len(seen) == len(looks) else "never"
    return row | {"looks": len(looks)}


def write(name: str, directory: Path, runs: int, points: int, *, tools: Path) -> str:
    """Returns how far it came in `WRITE_S`: all, or so many runs or points; or `FAILED`."""
    if name == "shoal":
        for n in range(runs):
            make_run(directory / f"made-{n + 1}", steps(points))
        return "all"
    script = Path(__file__).with_name("rival_data.py")
    words = [str(tools / "bin" / "python"), str(script), name, str(directory), str(runs), str(points), str(WRITE_S)]
    try:
        done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=2 * WRITE_S)
    except subprocess.SubprocessError as failure:
        print(f"{name}: {failure}", (getattr(failure, "stderr", "") or "")[-2000:], file=sys.stderr)
        return FAILED
    whole, written = map(int, done.stdout.splitlines()[-1].split())
    if not written:
        return FAILED
    if whole == runs:
        return "all"
    return f"{whole:,} of {runs:,} runs" if runs > 1 else f"{written:,} of {points:,} points"


def look(name: str, directory: Path, scene: str, runs: int, *, tools: Path) -> dict[str, float | None]:
    """Start the tool and open its pages in a fresh browser. None: not within `PATIENCE_S`."""
    from playwright.sync_api import Error

    seen: dict[str, float | None] = dict.fromkeys(SEEN)
    began_s = time.perf_counter()
    side = start(name, directory, runs, tools=tools)
    try:
        if not side.pages:
            return seen
        seen["start s"] = time.perf_counter() - began_s
        with open_browser() as browser:
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            received: list[int] = []
            session = page.context.new_cdp_session(page)
            session.send("Network.enable")
            session.on("Network.loadingFinished", lambda event: received.append(int(event["encodedDataLength"])))
            seen["first row s"] = _seconds_until(page, side.pages["list"], None)
            curve = side.pages["overlay" if scene == "overlay" else "curve"]
            seen["first curve s"] = _seconds_until(page, curve, HAS_CURVE)
            if seen["first curve s"] is not None:  # else the page may hang
                with contextlib.suppress(Error):
                    seen["page heap MB"] = page.evaluate("performance.memory.usedJSHeapSize") / 1e6
            seen["received MB"] = sum(received) / 1e6
        seen["server MB"] = side.memory_mb
        return seen
    finally:
        side.close()


def _seconds_until(page: Any, address: str, predicate: str | None) -> float | None:
    """Until the predicate holds; without one, until the name of a run is on the screen, also in a shadow root."""
    from playwright.sync_api import Error

    began_s = time.perf_counter()
    try:
        page.goto(address, timeout=1000 * PATIENCE_S)
        left_ms = max(1000 * (PATIENCE_S - (time.perf_counter() - began_s)), 1)
        if predicate is None:
            page.get_by_text(re.compile(r"made-\d")).first.wait_for(timeout=left_ms)
        else:
            page.wait_for_function(predicate, timeout=left_ms, polling=20)
    except Error:
        return None
    return time.perf_counter() - began_s


def start(name: str, directory: Path, runs: int, *, tools: Path) -> Side:
    """Without pages if nobody listens within `PATIENCE_S`."""
    port = _free_port()
    base = f"http://127.0.0.1:{port}"
    binary = str(tools / "bin" / name) if tools else ""
    if name == "shoal":
        process, lines = _start([sys.executable, "-m", "shoal", "web", "--runs", str(directory), "--listen", base[7:]])
        link = _line_with(lines, r"(http://\S+#code=\S+)")
        every = ",".join(f"made-{n + 1}" for n in range(min(runs, 100)))
        pages = {"list": link, "curve": f"{base}/#/run/made-1", "overlay": f"{base}/#/compare?runs={every}"}
    elif name == "tensorboard":
        process, lines = _start([binary, "--logdir", str(directory), "--port", str(port), "--host", "127.0.0.1"])
        pages = dict.fromkeys(("list", "curve", "overlay"), f"{base}/#timeseries")
    elif name == "mlflow":
        store = ["--backend-store-uri", f"sqlite:///{directory}/mlflow.db"]
        words = [binary, "server", *store, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
        process, lines = _start(words)
        experiment, run = (directory / "ids").read_text().split()
        listed = f"{base}/#/experiments/{experiment}/runs"
        pages = {"list": listed, "curve": f"{listed}/{run}/model-metrics", "overlay": f"{listed}?compareRunsMode=CHART"}
    else:
        words, place = [binary, "show", "--project", "made"], {"TRACKIO_DIR": str(directory)}
        process, lines = _start(words, GRADIO_SERVER_PORT=str(port), **place)
        base = _line_with(lines, r"(http://127\.0\.0\.1:\d+)").rstrip("/")
        pages = dict.fromkeys(("list", "curve", "overlay"), f"{base}/?project=made")
    return Side(process, pages if base and pages["list"] and _listens(base, process) else {})


def _start(words: list[str], **environment: str) -> tuple[subprocess.Popen[str], queue.SimpleQueue[str]]:
    """The process, and what it prints: that is read all the time, so that it never waits for a reader."""
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env=report.environment() | {"BROWSER": "true", "PYTHONUNBUFFERED": "1", **environment},
    )  # fmt: skip
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)

    threading.Thread(target=read, daemon=True).start()
    return process, lines


def _line_with(lines: queue.SimpleQueue[str], pattern: str) -> str:
    """What a line has that matches; '' if none comes within `PATIENCE_S`."""
    until_s = time.monotonic() + PATIENCE_S
    with contextlib.suppress(queue.Empty):
        while True:
            if found := re.search(pattern, lines.get(timeout=max(until_s - time.monotonic(), 0))):
                return found[1]
    return ""


def _listens(url: str, process: subprocess.Popen[str]) -> bool:
    """Waits until somebody does."""
    host, port = url.removeprefix("http://").split(":")
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s and process.poll() is None:
        try:
            socket.create_connection((host, int(port)), 1).close()
            return True
        except OSError:
            time.sleep(0.02)
    return False


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


if __name__ == "__main__":
    main()
