"""One process of the benchmark: trains its part of the model for some steps, and prints its peak as JSON."""

from __future__ import annotations

import json
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore
from torch.nn import functional

from benchmarks.overhead.models import GPT
from shoal.data.batch import Batch
from shoal.lanes.replica import Replica
from shoal.lanes.torch_setup import keep_freed_memory
from shoal.sharding.build_model import ActiveShardingConfig, build_sharded_model
from shoal.sharding.device_mesh import ShardMesh
from shoal.sharding.replica import ShardedReplica
from shoal.spec.sharding import FsdpConfig, PipelineParallelConfig, TensorParallelConfig

EVERY_S = 0.002
PAGE = 4096


def private_bytes() -> int:
    """Private memory of this process: resident, without files and shared memory."""
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * PAGE


class PeakMemory(threading.Thread):
    """Samples memory continuously, so that short peaks are not missed."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_bytes = self.most = private_bytes()
        self.start()

    def run(self) -> None:
        while True:
            self.most = max(self.most, private_bytes())
            time.sleep(EVERY_S)


def loss(model: Any, batch: Batch) -> torch.Tensor:
    return functional.cross_entropy(model(*batch.inputs), batch.target)


def batch(vocabulary: int, context: int, size: int, step: int) -> Batch:
    tokens = torch.randint(0, vocabulary, (size, context + 1), generator=torch.Generator().manual_seed(step))
    return Batch((tokens[:, :-1],), tokens[:, 1:], size)


def replica_of(kind: str, rank: int, size: int, store: str, make: Any, example: Batch) -> Replica:
    optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)
    if kind == "one":
        model = make()
        return Replica(model, optimizer(model.parameters()), loss, seed=0)
    grid = ShardMesh(FileStore(store, size), rank=rank, world_size=size, replica_size=size)
    shards: dict[str, ActiveShardingConfig] = {
        "fsdp": FsdpConfig(kind="fsdp"),
        "tensor": TensorParallelConfig(kind="tensor"),
        "pipeline": PipelineParallelConfig(kind="pipeline", microbatches=size),
    }
    cut, held = build_sharded_model(shards[kind], grid, make, loss=loss, example=example)
    return ShardedReplica(cut, held, optimizer(held.param_module.parameters()), loss, seed=0)


def main() -> None:
    kind, rank, size, store, told = sys.argv[1:]
    shape = json.loads(told)
    keep_freed_memory()  # as every worker does; sharded workers release it after all
    torch.set_num_threads(1)
    samples, steps = shape.pop("samples"), shape.pop("steps")
    vocabulary, context = shape["vocabulary"], shape["context"]
    peak = PeakMemory()
    torch.manual_seed(0)
    # With fsdp each worker has its own samples; otherwise all workers use the same samples.
    share = 1 / int(size) if kind == "fsdp" else 1.0
    samples = max(int(samples * share), 1)
    example = batch(vocabulary, context, samples, 0)
    replica = replica_of(kind, int(rank), int(size), store, partial(GPT, **shape), example)
    made = peak.most
    replica.probe(example)
    losses = []
    began = time.perf_counter()
    for step in range(steps):
        replica.begin_step()
        total = replica.forward_backward(step, 0, batch(vocabulary, context, samples, step), share=share)
        losses.append(float(replica.apply(step, total)))
        del total
    held = sum(p.numel() * p.itemsize for p in replica.trainable)
    row = {
        "held": held,
        "made": made - peak.start_bytes,
        "peak": peak.most - peak.start_bytes,
        "step_s": (time.perf_counter() - began) / steps,
        "loss": losses[-1],
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
