"""Does loading hold back training? A small and a larger network, trained with batches from a Parquet table on disk."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.overhead.loader import (
    BATCH,
    OPEN_GROUPS,
    WIDTH,
    Batches,
    from_batch_loader,
    in_process,
    table_loader,
    write_table,
)
from benchmarks.overhead.side_by_side import Bench, Numbers, Row, in_turns, median, ratio
from shoal.data.batch import Batch
from shoal.spec.sources.config import ParquetSourceConfig

HIDDEN = {"small": 256, "larger": 1024}
IN_MEMORY = "one batch in memory"
Pair = tuple[Tensor, Tensor]


def measure(bench: Bench) -> list[Row]:
    table = bench.scratch / "table.parquet"
    rows = write_table(table, (100 if bench.quick else 1000) << 20) // (4 * WIDTH)
    steps = min(rows // BATCH, 100 if bench.quick else 1000)
    found = [row for name, hidden in HIDDEN.items() for row in compare(name, hidden, table, steps, bench)]
    table.unlink()
    return found


def compare(network: str, hidden: int, table: Path, steps: int, bench: Bench) -> list[Row]:
    """Some steps of training per measurement, each in a process of its own."""
    bench.say(f"feed: {network} network, {steps} steps of {BATCH} samples, {bench.repeats} turns")
    parquet = ParquetSourceConfig(kind="parquet", path=str(table), target="y")
    feeds: dict[str, Callable[[], Batches]] = {
        IN_MEMORY: one_batch,
        "the table's batches, made before": functools.partial(made_before, parquet, steps),
        "shoal, Parquet": functools.partial(from_batch_loader, parquet),
        "DataLoader, 8 groups shuffled together": functools.partial(table_loader, table, 0, together=OPEN_GROUPS),
    }
    sides = {
        name: functools.partial(in_process, functools.partial(train, hidden, steps, make))
        for name, make in feeds.items()
    }
    found = in_turns(sides, bench.repeats)
    return [
        {
            "network": network,
            "batches": name,
            "steps/s": steps / median(numbers, "wall_s"),
            "of batches in memory": ratio(found[IN_MEMORY], numbers, "wall_s"),
            "waiting for batches": median(numbers, "waited_share"),
            "CPU ms of a step": 1e3 * median(numbers, "cpu_s") / steps,
            "of it the training thread": 1e3 * median(numbers, "own_cpu_s") / steps,
        }
        for name, numbers in found.items()
    ]


def one_batch() -> Iterator[Pair]:
    """The same batch again and again: training that never waits."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(BATCH, WIDTH, generator=generator), torch.randint(0, 10, (BATCH,), generator=generator)
    return itertools.repeat((x, y))


def made_before(parquet: ParquetSourceConfig, steps: int) -> Iterator[Batch]:
    """The same samples, decoded and gathered before training begins: what the caches of the processor cost."""
    yield from list(itertools.islice(from_batch_loader(parquet), steps))


def train(hidden: int, steps: int, make: Callable[[], Batches]) -> Numbers:
    """The time of the steps after the first, and the share of it in which the next batch was not there yet."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = map(_pair, make())
    began = began_cpu = began_own = waited_s = 0.0
    for step in range(steps):
        asked = time.perf_counter()
        x, y = next(batches)
        if step == 0:
            # Opening the file is no part of it.
            began, began_cpu, began_own = time.perf_counter(), time.process_time(), time.thread_time()
        else:
            waited_s += time.perf_counter() - asked
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    wall_s = time.perf_counter() - began
    cpu_s, own_cpu_s = time.process_time() - began_cpu, time.thread_time() - began_own
    return {"wall_s": wall_s, "waited_share": waited_s / wall_s, "cpu_s": cpu_s, "own_cpu_s": own_cpu_s}


def _pair(batch: Batch | Pair) -> Pair:
    return (batch.inputs[0], batch.target) if isinstance(batch, Batch) else batch
