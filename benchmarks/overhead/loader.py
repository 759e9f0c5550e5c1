"""Loading: Shoal's batch loader against torch's DataLoader, from memory and from a Parquet table on disk."""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

from benchmarks.overhead.side_by_side import Bench, Numbers, Row, in_turns, median, ratio
from shoal.data.batch_loader import BatchLoader
from shoal.data.samplers import make_sampler
from shoal.data.source import open_source
from shoal.spec.data import RandomSamplerConfig
from shoal.spec.sources.config import NpzSourceConfig, ParquetSourceConfig

BATCH, WIDTH, GROUP_ROWS = 256, 128, 8192
OPEN_GROUPS = RandomSamplerConfig().open_blocks
Batches = Iterable[Any]


def measure(bench: Bench) -> list[Row]:
    rows = 200_000 if bench.quick else 400_000
    memory = bench.scratch / "memory.npz"
    write_arrays(memory, rows)
    held: dict[str, Callable[[], Batches]] = {
        "shoal feed": functools.partial(from_batch_loader, NpzSourceConfig(kind="npz", path=str(memory))),
        "DataLoader": functools.partial(arrays_loader, memory, 0),
        "DataLoader, 2 workers": functools.partial(arrays_loader, memory, 2),
    }
    table = bench.scratch / "table.parquet"
    size_bytes = write_table(table, (200 if bench.quick else 2000) << 20)
    streamed: dict[str, Callable[[], Batches]] = {
        "shoal feed": functools.partial(
            from_batch_loader, ParquetSourceConfig(kind="parquet", path=str(table), target="y")
        ),
        "DataLoader, 8 groups shuffled together": functools.partial(table_loader, table, 0, together=OPEN_GROUPS),
        "DataLoader": functools.partial(table_loader, table, 0),
        "DataLoader, 2 workers": functools.partial(table_loader, table, 2),
    }
    turns = min(3, bench.repeats)
    found = [*compare("in memory", held, rows, turns, bench)]
    found += compare(f"Parquet, {size_bytes / 1e9:.1f} GB", streamed, size_bytes // (4 * WIDTH), turns, bench)
    table.unlink()
    return found


def compare(data: str, variants: dict[str, Callable[[], Batches]], rows: int, turns: int, bench: Bench) -> list[Row]:
    """One pass over the data per measurement, each in a process of its own."""
    bench.say(f"loader: {data}, {rows:,} rows, {turns} turns")
    found = in_turns(
        {name: functools.partial(in_process, functools.partial(one_pass, make)) for name, make in variants.items()},
        turns,
    )
    return [
        {
            "data": data,
            "loader": name,
            "samples/s": rows / median(numbers, "wall_s"),
            "of shoal": ratio(found["shoal feed"], numbers, "wall_s"),
            "CPU s": median(numbers, "cpu_s"),
            "CPU of shoal": ratio(found["shoal feed"], numbers, "cpu_s"),
            "peak growth MB": median(numbers, "grown_bytes") / 1e6,
            "growth in the 2nd half MB": median(numbers, "late_bytes") / 1e6,
        }
        for name, numbers in found.items()
    ]


def in_process(measured: Callable[[], Numbers]) -> Numbers:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=lambda: theirs.send(measured()))
    child.start()
    theirs.close()
    numbers: Numbers = ours.recv()
    child.join()
    return numbers


def one_pass(make: Callable[[], Batches]) -> Numbers:
    """The time of a pass, and the growth of the memory of this process and its children."""
    torch.set_num_threads(1)
    iterator = iter(make())
    next(iterator)
    with MemoryMonitor() as memory:
        start, start_cpu = time.perf_counter(), cpu_s()
        for _ in iterator:
            pass
        wall_s, used_s = time.perf_counter() - start, cpu_s() - start_cpu
    half = len(memory.seen) // 2
    first, second = max(memory.seen[: half + 1]), max(memory.seen[half:])
    grown = max(first, second) - memory.seen[0]
    return {"wall_s": wall_s, "cpu_s": used_s, "grown_bytes": grown, "late_bytes": max(0, second - first)}


def cpu_s() -> float:
    """Processor time of this process and its children, including children that have ended."""
    own = os.times()
    alive = [child.cpu_times() for child in psutil.Process().children()]
    return sum(own[:4]) + sum(float(t.user + t.system) for t in alive)


class MemoryMonitor:
    """Samples the memory of this process and its children, pages of files not counted, twenty times a second."""

    def __enter__(self) -> MemoryMonitor:
        self.seen = [self._now()]
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.05):
            self.seen.append(self._now())

    def _now(self) -> int:
        me = psutil.Process()
        total = 0
        for process in (me, *me.children()):
            with contextlib.suppress(psutil.NoSuchProcess):  # a loader process that has just ended
                memory = process.memory_info()
                total += memory.rss - memory.shared
        return total


# ---- the loaders ----


def from_batch_loader(spec: Any) -> Iterator[Any]:
    """Shoal: one epoch, shuffled, one lane."""
    source = open_source(spec, base_dir=".")
    ids = np.arange(len(source), dtype=np.int64)
    sampler = make_sampler(
        RandomSamplerConfig(), ids=ids, lanes=1, batch_size=BATCH, seed=0, drop_last=False, source=source
    )
    batch_loader = BatchLoader(source, sampler, seed=0, lanes=1)
    batch_loader.set_lanes([0], 0)
    yield from (batch_loader.get(step, 0) for step in range(sampler.steps_per_epoch))
    batch_loader.close()


def arrays_loader(path: Path, workers: int) -> Batches:
    """torch: everything in memory, samples collated one by one as TensorDataset does."""
    with np.load(path) as arrays:
        dataset: Dataset[Any] = TensorDataset(torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"]))
    return DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=workers)


def table_loader(path: Path, workers: int, *, together: int = 1) -> Batches:
    """torch: an IterableDataset over row groups in random order. `together` of them are shuffled together: 8 is what
    Shoal's sampler does."""
    return DataLoader(RowGroupDataset(path, together), batch_size=None, num_workers=workers)


class RowGroupDataset(IterableDataset[Any]):
    def __init__(self, path: Path, together: int) -> None:
        self.path, self.together = path, together

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        file = pq.ParquetFile(self.path)
        order = torch.randperm(file.num_row_groups, generator=torch.Generator().manual_seed(0)).tolist()
        own = list(itertools.islice(order, info.id if info else 0, None, info.num_workers if info else 1))
        for first in range(0, len(own), self.together):
            table = file.read_row_groups(own[first : first + self.together])
            columns = [table.column(name).to_numpy() for name in table.column_names if name != "y"]
            x, y = torch.from_numpy(np.stack(columns, axis=1)), torch.tensor(table.column("y").to_numpy())
            for ids in torch.split(torch.randperm(len(y)), BATCH):
                yield x[ids], y[ids]


# ---- the data ----


def write_arrays(path: Path, rows: int) -> None:
    rng = np.random.default_rng(0)
    np.savez_compressed(path, x=rng.integers(0, 9, (rows, WIDTH)).astype(np.float32), y=rng.integers(0, 10, rows))


def write_table(path: Path, size_bytes: int) -> int:
    """Float columns and a class, in row groups of a few MB; returns the size of the values."""
    rng = np.random.default_rng(0)
    groups = max(1, size_bytes // (4 * WIDTH * GROUP_ROWS))
    schema = pa.schema([*((f"x{i}", pa.float32()) for i in range(WIDTH)), ("y", pa.int64())])
    with pq.ParquetWriter(path, schema, compression="NONE", use_dictionary=False) as writer:
        for _ in range(groups):
            values = rng.random((WIDTH, GROUP_ROWS), dtype=np.float32)
            columns = [*values, rng.integers(0, 10, GROUP_ROWS)]
            writer.write_table(pa.table(columns, schema=schema), row_group_size=GROUP_ROWS)
    return groups * GROUP_ROWS * 4 * WIDTH
