"""python -m benchmarks.web: start, list, curves and end of `shoal web`, over generated runs; and what a worker spends
on samples of its usage.

The server is a process of its own. `cpu s` is the time that it computed, `wall s` what a client waited (the median of
turns); on a machine that others use only the first is steady. Sizes are what went over the wire, compressed.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from benchmarks import report
from shoal.events import Event
from shoal.events.stream import format_event
from shoal.fleet.usage import INTERVAL_S, UsageSampler
from shoal.jobs.queue.access_tokens import TokenFile
from shoal.web.app import static_files

PARTS = ("start", "runs", "points", "usage")
TURNS = 7
ROWS_PER_SMALL_RUN = 30
STARTED_T = 1.7e9
JOB = """\
name: made
model: {name: "model.py:Net"}
loss: {name: MSELoss}
data: {source: {kind: sklearn, name: digits}}
epochs: 1
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.web", description=__doc__)
    report.take_names(parser, "part", PARTS)
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing is kept: does it work?")
    asked = parser.parse_args()
    for part in asked.parts or PARTS:
        with tempfile.TemporaryDirectory(prefix="shoal-web-") as scratch:
            measure = {"start": start, "runs": many_runs, "points": many_points, "usage": usage}[part]
            found = measure(Path(scratch), asked.quick)
        Console().print(report.table(f"{part}: {found['what']}", found["rows"]))
        if not asked.quick:
            report.keep("web", part, found)


class Served:
    """`shoal web` as a process; `with` ends it by Ctrl-C and notes how long that took."""

    def __init__(self, runs: Path) -> None:
        self.token = TokenFile(runs).create(f"benchmark {time.time()}", role="read", runs=[], expires_t=None)
        words = [sys.executable, "-m", "shoal", "web", "--runs", str(runs), "--listen", "127.0.0.1:0"]
        began_s = time.perf_counter()
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        link = next(line for line in self.process.stdout if "#code=" in line)
        self.url = link.strip().partition("/#")[0]
        urllib.request.urlopen(f"{self.url}/", timeout=60).read(1)
        self.first_byte_s = time.perf_counter() - began_s
        self.end_s = 0.0
        self._measured = psutil.Process(self.process.pid)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *failure: object) -> None:
        began_s = time.perf_counter()
        self.process.send_signal(signal.SIGINT)
        self.process.wait()
        self.end_s = time.perf_counter() - began_s

    @property
    def cpu_s(self) -> float:
        spent = self._measured.cpu_times()
        return float(spent.user + spent.system)

    @property
    def rss_mb(self) -> float:
        return float(self._measured.memory_info().rss / 1e6)

    @property
    def peak_mb(self) -> float:
        """The most that it ever had."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1e3 * 1.024

    def open(self, path: str) -> Any:
        headers = {"authorization": f"Bearer {self.token}", "accept-encoding": "gzip"}
        return urllib.request.urlopen(urllib.request.Request(f"{self.url}{path}", headers=headers), timeout=600)

    def get(self, path: str) -> bytes:
        content: bytes = self.open(path).read()
        return content

    def measure(self, what: str, path: str, *, turns: int = TURNS) -> dict[str, Any]:
        """Seconds and bytes of a question."""
        walls, cpus, size = [], [], 0
        for _ in range(turns):
            cpu_s, began_s = self.cpu_s, time.perf_counter()
            size = len(self.get(path))
            walls.append(time.perf_counter() - began_s)
            cpus.append(self.cpu_s - cpu_s)
            if turns > 1:
                time.sleep(1.1)  # longer than the list is kept
        return _row(what, wall_s=statistics.median(walls), cpu_s=statistics.median(cpus), kb=size / 1e3, server=self)


def _row(what: str, *, wall_s: float, cpu_s: float, kb: float, server: Served) -> dict[str, Any]:
    return {
        "what": what, "wall s": round(wall_s, 3), "cpu s": round(cpu_s, 3), "kB": round(kb, 1),
        "server MB": round(server.rss_mb), "peak MB": round(server.peak_mb),
    }  # fmt: skip


def start(scratch: Path, quick: bool) -> dict[str, Any]:
    make_run(scratch / "small-1", steps(ROWS_PER_SMALL_RUN))
    firsts, ends = [], []
    for _ in range(2 if quick else TURNS):
        with Served(scratch) as server:
            cpu_s = server.cpu_s
            stream = server.open("/api/v1/stream?runs=small-1&after=0")
            stream.readline()
        firsts.append((server.first_byte_s, cpu_s))
        ends.append(server.end_s)
    with Served(scratch) as server:
        idle = idle_row(server, seconds=2 if quick else 30)
        page = sum(len(file.compressed) for name, file in static_files().items() if not name.startswith("file_"))
        delay = live_delay(server, scratch / "small-1", turns=3 if quick else 40)
        rows = [
            _row(
                "start to first byte", wall_s=_median(firsts, 0), cpu_s=_median(firsts, 1), kb=page / 1e3, server=server
            ),
            idle,
            _row("row written to message", wall_s=delay, cpu_s=0.0, kb=0.0, server=server),
            _row("Ctrl-C with an open stream", wall_s=max(ends), cpu_s=0.0, kb=0.0, server=server),
        ]
    return {
        "what": "kB of the first row: the whole page; the delay is the 95th of 100, the end the longest",
        "rows": rows,
    }


def idle_row(server: Served, *, seconds: float) -> dict[str, Any]:
    """Before anything is asked of it but its first byte."""
    cpu_s = server.cpu_s
    time.sleep(seconds)
    return _row("idle", wall_s=seconds, cpu_s=server.cpu_s - cpu_s, kb=0.0, server=server)


def _median(pairs: list[tuple[float, float]], at: int) -> float:
    return statistics.median(pair[at] for pair in pairs)


def live_delay(server: Served, run: Path, *, turns: int) -> float:
    """Seconds from the writing of a row until a reader of the stream has it: the 95th percentile."""
    stream = server.open(f"/api/v1/stream?runs={run.name}&after={(run / 'events.jsonl').stat().st_size}")
    delays = []
    for n in range(turns):
        with (run / "events.jsonl").open("ab") as file:
            file.write(format_event(Event("note", time.time(), "driver", None, {"message": f"row {n}"})))
        written_s = time.perf_counter()
        while f"row {n}".encode() not in stream.readline():
            pass
        delays.append(time.perf_counter() - written_s)
        time.sleep(0.03 * (n % 7))
    return sorted(delays)[int(0.95 * (len(delays) - 1))]


def many_runs(scratch: Path, quick: bool) -> dict[str, Any]:
    count = 30 if quick else 10_000
    content = b"".join(map(format_event, steps(ROWS_PER_SMALL_RUN)))
    for n in range(count):
        (scratch / f"made-{n + 1}").mkdir()
        (scratch / f"made-{n + 1}" / "job.yaml").write_text(JOB)
        (scratch / f"made-{n + 1}" / "events.jsonl").write_bytes(content)
    with Served(scratch) as server:
        rows = [
            server.measure("list, cold", "/api/v1/runs", turns=1),
            server.measure("list, warm", "/api/v1/runs"),
            server.measure("filter and sort", "/api/v1/runs?where=made-99%20step%3E10&sort=-loss"),
            server.measure("disk use", "/api/v1/storage", turns=1),
        ]
    return {"what": f"{count} runs of {ROWS_PER_SMALL_RUN} steps; 100 rows are sent", "rows": rows}


def many_points(scratch: Path, quick: bool) -> dict[str, Any]:
    count = 2_000 if quick else 1_000_000
    make_run(scratch / "big-1", steps(count))
    question = "/api/v1/runs/big-1/series?names=loss&points=600"
    page = "/api/v1/runs/big-1/series?points=500"  # every series, as the page asks
    with Served(scratch) as server:
        rows = [server.measure("first question: reads all events", page, turns=1)]
        rows.append(server.measure("the next", question))
        rows.append(server.measure("a zoom", f"{question}&from={count // 3}&to={count // 2}"))
        lossless = check_extremes(server, scratch / "big-1", question)
    with Served(scratch) as server:
        rows.append(server.measure("first question of a new server", question, turns=1))
    return {"what": f"{count} points; extremes of all events are in the answer: {lossless}", "rows": rows}


def usage(scratch: Path, quick: bool) -> dict[str, Any]:
    """What the heartbeat of a worker does every two seconds."""
    count = 100 if quick else 10_000
    ticks = itertools.count(0.0, INTERVAL_S)
    sampler = UsageSampler(lambda: 0, clock=lambda: next(ticks))
    began_s = time.process_time()
    samples = [sampler.sample() for _ in range(count)]
    each_s = (time.process_time() - began_s) / count
    assert all(samples)
    row = {"samples": count, "cpu us each": round(1e6 * each_s, 1), "% of a core": round(100 * each_s / INTERVAL_S, 4)}
    return {"what": f"a worker's samples of its usage, one every {INTERVAL_S:g} s", "rows": [row]}


def check_extremes(server: Served, run: Path, question: str) -> bool:
    (page,) = json.loads(gzip.decompress(server.get(question)))["series"]
    losses = [json.loads(line)["loss"] for line in (run / "events.jsonl").open() if '"loss"' in line]
    return bool((min(page["least"]), max(page["most"])) == (min(losses), max(losses)))


def steps(count: int) -> Iterator[Event]:
    """Rows with the fields of real ones."""
    yield Event("run_started", STARTED_T, "driver", None, {"run": "made-1", "schema": 2})
    yield Event("joined", STARTED_T, "worker-0", 0, {"lanes": [0], "view": 1, "saves": True})
    for n in range(1, count + 1):
        fields = {
            "steps": 1, "loss": 2.0 / n + (n * 7919 % 1000) / 5000, "lr": 0.01, "samples": 64, "wall_s": 0.05,
            "bytes_sent": 123456, "data_s": 0.001, "compute_s": 0.04, "exchange_s": 0.005, "waiting_s": 0.001,
        }  # fmt: skip
        yield Event("step", STARTED_T + 0.05 * n, "worker-0", n, fields)


def make_run(root: Path, events: Iterator[Event]) -> None:
    root.mkdir()
    (root / "job.yaml").write_text(JOB)
    with (root / "events.jsonl").open("wb") as file:
        file.writelines(map(format_event, events))


if __name__ == "__main__":
    main()
