"""python -m benchmarks.web.live: from a row that is written to its pixel, and what an open page costs a run.

`pixel`: rows are appended to a run whose page is open in Chromium; the page itself notes when its curve has changed.
`following`: what the server takes of a core while a run writes rows, without a run, so that it can be measured beside
other work.
`training`: one run trains all the time, and blocks without, with, with and without an open page follow each other, so
that both see the same machine. In a block without a page the server and the browser are stopped (SIGSTOP). Four blocks
give one ratio of steps per second, and one of the processor time that the run's processes take for a step. The page's
part is played by a reader of the server's messages: what remains if the browser is on another machine.
`browser`: the same with a page in Chromium on the cores that train.
The browser's parts need what `tools/install_browser.sh` installs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from rich.console import Console
from tests.web.browser import open_browser
from tests.web.live_run import training

from benchmarks import report
from benchmarks.web.__main__ import ROWS_PER_SMALL_RUN, Served, make_run, steps
from shoal.events.stream import EventReader, format_event
from shoal.spec.run_paths import RunPaths

PARTS = ("pixel", "following", "training", "browser")
ROWS_PER_S = 20
CPUCLOCK_SCHED = 2
SETTLE_S = 5.0
SWITCH_S = 0.2
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
    parser.add_argument("--turns", type=int, default=400, help="of four blocks: without, with, with, without a page")
    parser.add_argument("--block", type=float, default=0.5, help="seconds of each")
    parser.add_argument("--quick", action="store_true", help="a few rows and windows, nothing is kept: does it work?")
    asked = parser.parse_args()
    for part in asked.parts or PARTS:
        with tempfile.TemporaryDirectory(prefix="shoal-live-") as scratch:
            if part == "pixel":
                found = pixel(Path(scratch), turns=3 if asked.quick else 100)
            elif part == "following":
                found = following(Path(scratch), seconds=2 if asked.quick else 30)
            else:
                side, workers = ("stream", (1, 2)) if part == "training" else ("page", (1,))
                turns = 2 if asked.quick else asked.turns
                found = slowed(Path(scratch), side, workers=workers, turns=turns, block_s=asked.block)
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


def following(scratch: Path, *, seconds: float) -> dict[str, Any]:
    """The server's processor time beside a run that writes as many rows as one worker may, without a run's load."""
    make_run(scratch / "live-1", islice(steps(ROWS_PER_SMALL_RUN), ROWS_PER_SMALL_RUN))
    rows = []
    with Served(scratch) as server, growing(scratch / "live-1"):
        for what, watch in (("nothing", None), ("stream", open_reader), ("page", open_browser_page)):
            with watch(server, "live-1") if watch else contextlib.nullcontext():
                time.sleep(SETTLE_S)
                before_s = cpu_s([server.process.pid])
                time.sleep(seconds)
                share = (cpu_s([server.process.pid]) - before_s) / seconds
            rows.append({"open": what, "server, % of a core": round(100 * share, 3)})
    return {"what": f"{ROWS_PER_S} rows per second, {seconds:g} s of each", "rows": rows}


@contextlib.contextmanager
def growing(run: Path) -> Iterator[None]:
    """Rows are written two at a time, as a run does it."""
    ended, rows = threading.Event(), islice(steps(10**6), ROWS_PER_SMALL_RUN, None)

    def write() -> None:
        with (run / "events.jsonl").open("ab", buffering=0) as file:
            while not ended.wait(2 / ROWS_PER_S):
                file.write(b"".join(map(format_event, islice(rows, 2))))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def slowed(scratch: Path, side: str, *, workers: Sequence[int], turns: int, block_s: float) -> dict[str, Any]:
    """One worker leaves a core to the page; two take both."""
    rows = []
    for count in workers:
        directory = scratch / f"{count}"
        with (
            training(directory / "job", directory / "runs", epochs=10**6, workers=str(count)) as paths,
            Served(paths.root.parent) as server,
            (open_browser_page if side == "page" else open_reader)(server, paths.name) as reader,
        ):
            row = compare(paths, [server.process.pid, *reader], server, turns=turns, block_s=block_s)
        rows.append({"open": side, "workers": count, **row})
    what = f"a run with and without a page, {turns} turns of four blocks of {block_s:g} s, ± standard error"
    return {"what": what, "rows": rows}


class Block(NamedTuple):
    """What one block saw: steps per second, processor time of the run's processes per step, the server's share of a
    core."""

    speed: float
    step_cpu_s: float
    server_share: float


def compare(paths: RunPaths, watchers: list[int], server: Served, *, turns: int, block_s: float) -> dict[str, Any]:
    """Blocks without, with, with, without the watchers, which are stopped meanwhile: what changes slowly falls out."""
    driver = psutil.Process(int(paths.lock.read_text()))
    run = [driver.pid, *(one.pid for one in driver.children(recursive=True))]
    time.sleep(SETTLE_S)  # the first blocks are not slower
    slower, dearer, shares = [], [], []
    for _ in range(turns):
        seen: dict[bool, list[Block]] = {False: [], True: []}
        for is_open in (False, True, True, False):
            with contextlib.nullcontext() if is_open else stopped(watchers):
                time.sleep(SWITCH_S)
                seen[is_open].append(measure_block(paths, run, server, block_s=block_s))
        mean = {is_open: Block(*map(statistics.fmean, zip(*blocks, strict=True))) for is_open, blocks in seen.items()}
        slower.append(100 * (1 - mean[True].speed / mean[False].speed))
        dearer.append(100 * (mean[True].step_cpu_s / mean[False].step_cpu_s - 1))
        shares.append(100 * mean[True].server_share)
    return {
        "slowed %": round(statistics.fmean(slower), 2), "± %": round(standard_error(slower), 2),
        "cpu per step, + %": round(statistics.fmean(dearer), 2), "± % of it": round(standard_error(dearer), 2),
        "server, % of a core": round(statistics.fmean(shares), 2),
    }  # fmt: skip


def standard_error(values: list[float]) -> float:
    return float(statistics.stdev(values) / len(values) ** 0.5)


@contextlib.contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def measure_block(paths: RunPaths, run: list[int], server: Served, *, block_s: float) -> Block:
    begin = cpu_s(run), cpu_s([server.process.pid]), time.time(), paths.events.stat().st_size
    time.sleep(block_s)
    run_s, server_s, seconds = cpu_s(run) - begin[0], cpu_s([server.process.pid]) - begin[1], time.time() - begin[2]
    events = EventReader(paths.events, offset=begin[3]).read_new()
    rows = [(one.t, one.step) for one in events if one.kind == "step" and one.who == "worker-0" and one.step]
    speed = float(rows[-1][1] - rows[0][1]) / (rows[-1][0] - rows[0][0])
    return Block(speed, run_s / seconds / speed, server_s / seconds)


def cpu_s(pids: list[int]) -> float:
    """Processor time of processes, also of threads that have ended, to the nanosecond: clock_getcpuclockid(3)."""
    return sum(time.clock_gettime_ns((~pid << 3) | CPUCLOCK_SCHED) for pid in pids) / 1e9


@contextlib.contextmanager
def open_browser_page(server: Served, run: str) -> Iterator[list[int]]:
    """The processes of a Chromium that shows the curves."""
    before = {one.pid for one in psutil.Process().children(recursive=True)}
    with open_browser() as browser, open_page(browser, server, run):
        every = psutil.Process().children(recursive=True)
        yield [one.pid for one in every if one.pid not in before and "chrom" in one.name()]


@contextlib.contextmanager
def open_reader(server: Served, run: str) -> Iterator[list[int]]:
    """A process that reads the stream as a page does, and does next to nothing with it."""
    words = [sys.executable, "-m", "benchmarks.web.reader", server.url, server.token, run]
    reader = subprocess.Popen(words, env=report.environment())
    try:
        yield [reader.pid]
    finally:
        reader.terminate()
        reader.wait()


if __name__ == "__main__":
    main()
