"""python -m benchmarks.web.rivals: `shoal web` beside TensorBoard, MLflow and trackio, on the same data.

Each tool writes the same curves with its own writer, is started, and its page is opened in Chromium: seconds until the
name of a run is on the screen, and until a curve is; bytes that the browser received; memory of the server's processes
and of the page's scripts. `--install DIR` makes an environment with the other tools; `--tools DIR` uses it.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
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
PATIENCE_S = 180.0
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
    pages: Mapping[str, str]

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    @property
    def memory_mb(self) -> float:
        """Of all its processes; pages that they share count once (PSS)."""
        every = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        return float(sum(one.memory_full_info().pss for one in every) / 1e6)


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
        rows = [
            row
            for side in (SIDES if asked.tools else SIDES[:1])
            for row in [measure(side, scene, runs, points, tools=asked.tools, turns=1 if asked.quick else asked.turns)]
        ]
        found = {"what": f"{runs} runs of {points} points", "rows": rows}
        Console().print(report.table(f"{scene}: {found['what']}", rows))
        if not asked.quick:
            report.keep("web", f"rivals {scene}", found)


def measure(name: str, scene: str, runs: int, points: int, *, tools: Path, turns: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix=f"shoal-rivals-{name}-") as scratch:
        directory = Path(scratch)
        began_s = time.perf_counter()
        write(name, directory, runs, points, tools=tools)
        wrote_s = time.perf_counter() - began_s
        looks = [look(name, directory, scene, runs, tools=tools)]
        while len(looks) < turns and None not in looks[-1].values():  # what never comes is not waited for again
            looks.append(look(name, directory, scene, runs, tools=tools))
    row: dict[str, Any] = {"tool": name, "write s": round(wrote_s, 1)}
    for key in looks[0]:
        seen = [value for one in looks if (value := one[key]) is not None]
        row[key] = round(statistics.median(seen), 2) if len(seen) == len(looks) else "never"
    return row


def write(name: str, directory: Path, runs: int, points: int, *, tools: Path) -> None:
    if name == "shoal":
        for n in range(runs):
            make_run(directory / f"made-{n + 1}", steps(points))
        return
    script = Path(__file__).with_name("rival_data.py")
    words = [str(tools / "bin" / "python"), str(script), name, str(directory), str(runs), str(points)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def look(name: str, directory: Path, scene: str, runs: int, *, tools: Path) -> dict[str, float | None]:
    """Start the tool and open its pages in a fresh browser. None: not within `PATIENCE_S`."""
    began_s = time.perf_counter()
    side = start(name, directory, runs, tools=tools)
    try:
        started_s = time.perf_counter() - began_s
        with open_browser() as browser:
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            received: list[int] = []
            session = page.context.new_cdp_session(page)
            session.send("Network.enable")
            session.on("Network.loadingFinished", lambda event: received.append(int(event["encodedDataLength"])))
            row_s = _seconds_until(
                page, side.pages["list"], "() => /made-\\d/.test(document.body.innerText)", pierce=True
            )
            curve_s = _seconds_until(page, side.pages["overlay" if scene == "overlay" else "curve"], HAS_CURVE)
            heap = page.evaluate("performance.memory ? performance.memory.usedJSHeapSize : 0")
        return {"start s": started_s, "first row s": row_s, "first curve s": curve_s,
                "received MB": sum(received) / 1e6, "server MB": side.memory_mb,
                "page heap MB": heap / 1e6}  # fmt: skip
    finally:
        side.close()


def _seconds_until(page: Any, address: str, predicate: str, *, pierce: bool = False) -> float | None:
    """Until the predicate holds, or, with `pierce`, the name of a run is visible in any shadow root."""
    from playwright.sync_api import Error

    began_s = time.perf_counter()
    try:
        page.goto(address, timeout=1000 * PATIENCE_S)
        if pierce:
            page.get_by_text(re.compile(r"made-\d")).first.wait_for(timeout=1000 * PATIENCE_S)
        else:
            page.wait_for_function(predicate, timeout=1000 * PATIENCE_S, polling=20)
    except Error:
        return None
    return time.perf_counter() - began_s


def start(name: str, directory: Path, runs: int, *, tools: Path) -> Side:
    port = _free_port()
    base = f"http://127.0.0.1:{port}"
    if name == "shoal":
        words = [sys.executable, "-m", "shoal", "web", "--runs", str(directory), "--listen", f"127.0.0.1:{port}"]
        process = _start(words)
        link = _line_with(process, r"(http://\S+#code=\S+)")
        every = ",".join(f"made-{n + 1}" for n in range(min(runs, 100)))
        return Side(
            process, {"list": link, "curve": f"{base}/#/run/made-1", "overlay": f"{base}/#/compare?runs={every}"}
        )
    binary = str(tools / "bin" / name)
    if name == "tensorboard":
        process = _start([binary, "--logdir", str(directory), "--port", str(port), "--host", "127.0.0.1"])
        pages = dict.fromkeys(("list", "curve", "overlay"), f"{base}/#timeseries")
    elif name == "mlflow":
        store = ["--backend-store-uri", f"sqlite:///{directory}/mlflow.db"]
        process = _start([binary, "server", *store, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"])
        experiment, run = (directory / "ids").read_text().split()
        listed = f"{base}/#/experiments/{experiment}/runs"
        pages = {"list": listed, "curve": f"{listed}/{run}/model-metrics", "overlay": f"{listed}?compareRunsMode=CHART"}
    else:
        process = _start(
            [binary, "show", "--project", "made"], TRACKIO_DIR=str(directory), GRADIO_SERVER_PORT=str(port)
        )
        base = _line_with(process, r"(http://127\.0\.0\.1:\d+)").rstrip("/")
        pages = dict.fromkeys(("list", "curve", "overlay"), f"{base}/?project=made")
    _wait_for(base, process)
    return Side(process, pages)


def _start(words: list[str], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env=report.environment() | {"BROWSER": "true", "PYTHONUNBUFFERED": "1", **environment},
    )  # fmt: skip


def _line_with(process: subprocess.Popen[str], pattern: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(pattern, line):
            return found[1]
    raise RuntimeError(f"{process.args!r} ended")


def _wait_for(url: str, process: subprocess.Popen[str]) -> None:
    """Until somebody listens."""
    host, port = url.removeprefix("http://").split(":")
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until and process.poll() is None:
        try:
            socket.create_connection((host, int(port)), 1).close()
            return
        except OSError:
            time.sleep(0.02)
    raise RuntimeError(f"{process.args!r} does not listen")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


if __name__ == "__main__":
    main()
