"""Saving: how long training is blocked, how long writing takes, and how many bytes are stored."""

from __future__ import annotations

import functools
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.overhead.side_by_side import Bench, Numbers, Row, in_turns, median, ratio
from shoal.checkpoint.store import CheckpointStore

TENSORS = 24
SAVES = 10


def measure(bench: Bench) -> list[Row]:
    state = make_state((50 if bench.quick else 500) << 20)
    return [*stalls(state, bench), *stored(state, bench)]


def make_state(size_bytes: int) -> dict[str, Any]:
    """Weights and two moments of Adam, a third each."""
    count = size_bytes // (4 * 3 * TENSORS)
    names = [f"layer{i}" for i in range(TENSORS)]
    moments = {name: {"exp_avg": torch.randn(count), "exp_avg_sq": torch.rand(count)} for name in names}
    return {"model": {name: torch.randn(count) for name in names}, "optimizer": moments}


def change(state: dict[str, Any], *, half: bool = False) -> None:
    """Change the state as a training step does; `half`: the first half of the layers is frozen."""
    for name in list(state["model"])[TENSORS // 2 if half else 0 :]:
        for tensor in (state["model"][name], *state["optimizer"].get(name, {}).values()):
            tensor.add_(1e-3)


def stalls(state: dict[str, Any], bench: Bench) -> list[Row]:
    bench.say(f"checkpoint: stall, {bench.repeats} turns")
    place = bench.scratch / "shoal"
    store = CheckpointStore(place, job_sha256=None, keep=2)
    save_with_shoal(store, state)  # memory for copies is allocated once
    variants: dict[str, Callable[[], Numbers]] = {
        "shoal": functools.partial(save_with_shoal, store, state),
        "torch.save": functools.partial(save_with_torch, state, bench.scratch / "state.pt", sync=False),
        "torch.save + fsync": functools.partial(save_with_torch, state, bench.scratch / "state.pt", sync=True),
    }
    found = in_turns(variants, bench.repeats)
    store.close()
    shutil.rmtree(place)
    return [
        {
            "what": "training stands still",
            "how": name,
            "ms": 1000 * median(numbers, "stall_s"),
            "of torch.save": ratio(numbers, found["torch.save"], "stall_s"),
            "until on disk ms": 1000 * median(numbers, "total_s"),
            "CPU ms": 1000 * median(numbers, "cpu_s"),
            "stored MB": "",
        }
        for name, numbers in found.items()
    ]


_steps = iter(range(1, 1 << 30))


def save_with_shoal(store: CheckpointStore, state: dict[str, Any]) -> Numbers:
    change(state)
    start, start_cpu = time.perf_counter(), time.process_time()
    store.save(next(_steps), state)
    stall_s = time.perf_counter() - start
    store.wait()
    return {"stall_s": stall_s, "total_s": time.perf_counter() - start, "cpu_s": time.process_time() - start_cpu}


def save_with_torch(state: dict[str, Any], path: Path, *, sync: bool) -> Numbers:
    change(state)
    start, start_cpu = time.perf_counter(), time.process_time()
    with path.open("wb") as file:
        torch.save(state, file)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    wall_s = time.perf_counter() - start
    cpu_s = time.process_time() - start_cpu
    path.unlink()
    os.sync()  # pending writes must not slow the next round
    return {"stall_s": wall_s, "total_s": wall_s, "cpu_s": cpu_s}


def stored(state: dict[str, Any], bench: Bench) -> list[Row]:
    """Ten checkpoints of a half-frozen model, whose optimizer has no moments for the frozen half."""
    bench.say(f"checkpoint: {SAVES} of a half-frozen model")
    frozen = list(state["model"])[: TENSORS // 2]
    half = {"model": state["model"], "optimizer": {n: m for n, m in state["optimizer"].items() if n not in frozen}}
    store = CheckpointStore(bench.scratch / "shoal", job_sha256=None, keep=SAVES)
    for _ in range(SAVES):
        change(half, half=True)
        store.save(next(_steps), half)
        store.wait()
    store.close()
    path = bench.scratch / "state.pt"
    torch.save(half, path)
    sizes = {"shoal": size_of(bench.scratch / "shoal"), "torch.save": SAVES * path.stat().st_size}
    shutil.rmtree(bench.scratch / "shoal")
    path.unlink()
    empty = dict.fromkeys(("ms", "of torch.save", "until on disk ms", "CPU ms"), "")
    title = f"{SAVES} saves, half frozen"
    return [
        {"what": title, "how": name, **empty, "of torch.save": size / sizes["torch.save"], "stored MB": size / 1e6}
        for name, size in sizes.items()
    ]


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
