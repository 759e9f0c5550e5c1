"""From the command to the first step: `shoal run` against a plain script and against `import torch` alone."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import time
from typing import Any

import yaml

from benchmarks.overhead import models
from benchmarks.overhead.runs import job
from benchmarks.overhead.side_by_side import Bench, Numbers, Row, in_turns, median, ratio
from shoal.events import read_events

MODEL = {"name": f"{models.__file__}:mlp"}


def measure(bench: Bench) -> list[Row]:
    """`total` is the time to the first step (`import torch`: to the end of the process)."""
    bench.say(f"start: {bench.repeats} turns")
    variants = {
        "import torch": functools.partial(only_torch, bench),
        "plain script": functools.partial(plain_script, bench),
        "shoal run": functools.partial(shoal_command, bench),
    }
    found = in_turns(variants, bench.repeats)
    rows: list[Row] = []
    for name, numbers in found.items():
        against = ratio(numbers, found["import torch"], "total")
        rows.append({"command": name, "part": "total", "s": median(numbers, "total"), "of import torch": against})
        for part in numbers[0]:
            if part != "total":
                rows.append({"command": "", "part": part, "s": median(numbers, part), "of import torch": ""})
    return rows


def only_torch(bench: Bench) -> Numbers:
    return {"total": timed_command([sys.executable, "-c", "import torch"])[0]}


def plain_script(bench: Bench) -> Numbers:
    began = time.time()
    _, out = timed_command([sys.executable, "-m", "benchmarks.overhead.script", str(bench.data)])
    start, imported, loaded, built, stepped = map(float, out.split())
    return {
        "python": start - began,
        "torch": imported - start,
        "data": loaded - imported,
        "optimizer": built - loaded,
        "a step": stepped - built,
        "total": stepped - began,
    }


def shoal_command(bench: Bench) -> Numbers:
    """The times of the phases, from the event stream. All clocks are those of this machine."""
    runs = bench.scratch / "start"
    path = bench.scratch / "start.yaml"
    path.write_text(yaml.safe_dump(job("mlp", bench.data, steps=1, window={}) | {"model": MODEL}))
    shoal = shutil.which("shoal", path=os.path.dirname(sys.executable)) or "shoal"
    began = time.time()
    timed_command([shoal, "run", str(path), "--quiet", "--runs", str(runs)])
    at: dict[str, Any] = {event.kind: event.t for event in read_events(runs / "mlp-1" / "events.jsonl")}
    shutil.rmtree(runs)
    return {
        "the driver stands": at["run_started"] - began,
        "a worker is born": at["worker_started"] - at["run_started"],
        "data, model, optimizer": at["built"] - at["worker_started"],
        "a step": at["step"] - at["built"],
        "total": at["step"] - began,
    }


def timed_command(command: list[str]) -> tuple[float, str]:
    start = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return time.perf_counter() - start, done.stdout
