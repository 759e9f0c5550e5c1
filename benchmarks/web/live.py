"""python -m benchmarks.web.live: from a row that is written to its pixel, and what an open page costs a run.

`pixel`: rows are appended to a run whose page is open in Chromium; the page itself notes when its curve has changed.
`training`: one run trains all the time, and windows with and without an open page take turns, so that both see the same
machine. Their order changes each time, and a pair gives one ratio of steps per second. `stream` is a reader of the
server's messages instead of a browser: what remains if the browser is on another machine. Windows differ by some per
cent without any page, so the server's own share of a core is told too: on a machine without a free core, training loses
that. Needs what `tools/install_browser.sh` installs.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from tests.web.browser import open_browser
from tests.web.live_run import training

from benchmarks import report
from benchmarks.web.__main__ import ROWS_PER_SMALL_RUN, Served, make_run, steps
from shoal.events.stream import format_event, read_events
from shoal.spec.run_paths import RunPaths

PARTS = ("pixel", "training")
DESK = {"width": 1280, "height": 900}
WATCH = """() => {
  const canvas = document.querySelector(".plot canvas");
  let before = null;
  window.changes = [];
  const look = () => {
    const now = canvas.toDataURL();
    if (before !== null && now !== before) window.changes.push(performance.timeOrigin + performance.now());
    before = now;
    requestAnimationFrame(look);
  };
  look();
}"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.web.live", description=__doc__)
    report.take_names(parser, "part", PARTS)
    parser.add_argument("--pairs", type=int, default=20, help="windows with a page, and as many without")
    parser.add_argument("--window", type=float, default=6.0, help="seconds of each")
    parser.add_argument("--quick", action="store_true", help="a few rows and windows, nothing is kept: does it work?")
    asked = parser.parse_args()
    for part in asked.parts or PARTS:
        with tempfile.TemporaryDirectory(prefix="shoal-live-") as scratch:
            if part == "pixel":
                found = pixel(Path(scratch), turns=3 if asked.quick else 100)
            else:
                found = slowed(Path(scratch), pairs=2 if asked.quick else asked.pairs, window_s=asked.window)
        Console().print(report.table(f"{part}: {found['what']}", found["rows"]))
        if not asked.quick:
            report.keep("web", part, found)


@contextlib.contextmanager
def open_page(browser: Any, server: Served, run: str) -> Iterator[Any]:
    """The curves of a run, drawn."""
    context = browser.new_context(viewport=DESK)
    try:
        page = context.new_page()
        page.goto(f"{server.url}/#token={server.token}")
        page.locator("table.runs a").first.wait_for()
        page.goto(f"{server.url}/#/run/{run}")
        page.locator(".plot canvas").first.wait_for()
        yield page
    finally:
        context.close()


def pixel(scratch: Path, *, turns: int) -> dict[str, Any]:
    rows = steps(ROWS_PER_SMALL_RUN + turns + 1)
    make_run(scratch / "live-1", islice(rows, ROWS_PER_SMALL_RUN))
    delays = []
    with Served(scratch) as server, open_browser() as browser, open_page(browser, server, "live-1") as page:
        page.wait_for_timeout(2000)  # until the stream is open
        page.evaluate(WATCH)
        for n, row in enumerate(islice(rows, turns)):
            page.wait_for_timeout(1500 + 50 * (n % 7))  # what the last row brings has been drawn by then
            page.evaluate("() => { window.changes.length = 0; }")
            with (scratch / "live-1" / "events.jsonl").open("ab") as file:
                file.write(format_event(row))
            written_t = time.time()
            page.wait_for_function("() => window.changes.length > 0", polling=20)
            delays.append(page.evaluate("window.changes[0]") / 1000 - written_t)
    delays.sort()
    shown = {"rows": len(delays), "median s": round(statistics.median(delays), 3),
             "p95 s": round(delays[int(0.95 * (len(delays) - 1))], 3), "longest s": round(delays[-1], 3)}  # fmt: skip
    return {"what": "from a row written to its pixel", "rows": [shown]}


def slowed(scratch: Path, *, pairs: int, window_s: float) -> dict[str, Any]:
    """Of one run on one worker: the machine has a core for the rest."""
    with training(scratch / "job", scratch / "runs", epochs=10**6, workers="1") as paths, open_browser() as browser:
        time.sleep(10)  # the first windows are not slower
        rows = []
        for side in ("stream", "page"):
            ratios, shares = [], []
            for n in range(pairs):
                speeds = {}
                for is_open in (True, False) if n % 2 else (False, True):
                    speeds[is_open], share = speed(paths, side if is_open else "", browser, window_s=window_s)
                    shares += [share] if is_open else []
                ratios.append(1 - speeds[True] / speeds[False])
            error = statistics.stdev(ratios) / len(ratios) ** 0.5
            rows.append({"open": side, "pairs": pairs, "slowed %": round(100 * statistics.median(ratios), 2),
                         "mean %": round(100 * statistics.fmean(ratios), 2), "± %": round(100 * error, 2),
                         "server, % of a core": round(100 * statistics.median(shares), 2)})  # fmt: skip
    return {"what": f"steps/s of a run on one worker, windows of {window_s:g} s", "rows": rows}


def speed(paths: RunPaths, side: str, browser: Any, *, window_s: float) -> tuple[float, float]:
    """Steps per second while the page is open, and the server's share of a core. Without a side there is no server."""
    with contextlib.ExitStack() as opened:
        server = None
        if side:
            server = opened.enter_context(Served(paths.root.parent))
            look: AbstractContextManager[Any] = open_page(browser, server, paths.name)
            opened.enter_context(look if side == "page" else reading(server, paths.name))
        time.sleep(1)
        begin_t, before_s = time.time(), server.cpu_s if server else 0.0
        time.sleep(window_s)
        share = (server.cpu_s - before_s) / window_s if server else 0.0
        seen = [
            (event.t, event.step)
            for event in read_events(paths.events)
            if event.kind == "step" and event.t >= begin_t and event.step is not None
        ]
    return (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0]), share


@contextlib.contextmanager
def reading(server: Served, run: str) -> Iterator[None]:
    """Read the stream of a run and ask for its state, as a page does."""
    stream = server.open(f"/api/v1/stream?runs={run}")
    ended = threading.Event()

    def read() -> None:
        asked_s = time.monotonic()
        with contextlib.suppress(OSError, ValueError):
            while not ended.is_set() and stream.readline():
                if time.monotonic() - asked_s > 1:
                    server.get(f"/api/v1/runs/{run}")
                    asked_s = time.monotonic()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        stream.close()


if __name__ == "__main__":
    main()
