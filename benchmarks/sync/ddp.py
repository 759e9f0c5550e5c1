"""Plain torch over processes: the fastest loop of the overhead benchmark, with DistributedDataParallel around it.

One process alone is the same loop without the wrapper. The global batch is the same for any number of processes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.overhead.plain import Pair, arrays, train
from benchmarks.overhead.runs import BATCH
from benchmarks.sync.stopwatch import steps_to_run, timed
from shoal.fleet.engine import Launch
from shoal.fleet.engines.make import make_engine
from shoal.fleet.forkserver import ForkServer
from shoal.spec.engine import LocalEngineConfig
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import Seat

ENTRY = "benchmarks.sync.ddp"


def run(asked: dict[str, Any], logs: Path, fork_server: ForkServer) -> None:
    """The driver's side: as many processes as asked for, from the fork server of Shoal's workers, until all ended."""
    engine = make_engine(LocalEngineConfig(), RunPaths.at(logs), fork_server)
    try:
        words = (json.dumps(asked),)
        engine.start([Launch(Seat(number=rank), ENTRY, words) for rank in range(asked["workers"])])
        ended = 0
        while ended < asked["workers"]:
            exits = engine.poll(1.0)
            ended += len(exits)
            if any(one.code != 0 for one in exits):  # the others would wait for it
                raise RuntimeError(f"a process of the plain side failed, see {logs}")
    finally:
        engine.close()


def main() -> None:
    asked = json.loads(sys.argv[-1])
    rank, workers = int(sys.argv[sys.argv.index("--seat") + 1]), asked["workers"]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: nn.Module = timed(asked["model"], steps=asked["steps"], calls=1, reports=asked["reports"])
    if workers > 1:
        meeting = f"file://{asked['reports']}/meeting"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=workers)
        model = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    inputs, targets = arrays(Path(asked["data"]), asked["model"])
    mine = batches(inputs, targets, BATCH[asked["model"]], rank=rank, workers=workers)
    train(model, optimizer, mine, steps=steps_to_run(asked["steps"]))
    if workers > 1:
        dist.barrier()
        os._exit(0)  # destroying gloo's group hangs sometimes, after everything is measured


def batches(inputs: Tensor, targets: Tensor, batch_size: int, *, rank: int, workers: int) -> Iterator[Pair]:
    """This rank's part of each global batch: all ranks use the same permutation, and each takes every n-th sample."""
    made = torch.Generator().manual_seed(0)
    while True:
        for ids in torch.split(torch.randperm(len(inputs), generator=made), batch_size):
            part = ids[rank::workers]
            yield inputs.index_select(0, part), targets.index_select(0, part)
