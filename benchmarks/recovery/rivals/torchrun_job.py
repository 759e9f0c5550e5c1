"""torchrun's recipe: DistributedDataParallel, a checkpoint every few steps, and all start again from the newest one.

`torchrun --standalone --nnodes=1 --nproc-per-node=3 --max-restarts=100 torchrun_job.py WORKLOAD`
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DistributedSampler

from benchmarks.recovery.workload import CommitLog, Workload, save_atomically


def main() -> None:
    workload = Workload.from_text(sys.argv[-1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(workload.model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(workload, model, optimizer, start=resume(workload, model, optimizer))


def resume(workload: Workload, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    if not workload.checkpoint.is_file():
        return 0
    saved = torch.load(workload.checkpoint)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


def train(workload: Workload, model: nn.Module, optimizer: torch.optim.Optimizer, *, start: int) -> None:
    inputs, targets = workload.images()
    rows = CommitLog(workload, dist.get_rank())
    criterion = nn.CrossEntropyLoss()
    for step, ids in zip(itertools.count(start), batches(workload, start), strict=False):
        optimizer.zero_grad()
        criterion(model(inputs[ids]), targets[ids]).backward()
        optimizer.step()
        rows.add(step, ids)
        if (step + 1) % workload.save_every == 0 and dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            save_atomically(state, workload.checkpoint)


def batches(workload: Workload, start: int) -> Iterator[list[int]]:
    """This rank's batches from a step on, also within an epoch, so that a restart neither skips nor repeats samples."""
    sampler: DistributedSampler[int] = DistributedSampler(range(workload.samples), seed=workload.seed)  # type: ignore[arg-type]
    first, skip = divmod(start, workload.steps_per_epoch)
    for epoch in itertools.count(first):
        sampler.set_epoch(epoch)
        yield from itertools.islice(BatchSampler(sampler, workload.batch_size, drop_last=True), skip, None)
        skip = 0


if __name__ == "__main__":
    main()
