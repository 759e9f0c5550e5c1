"""torchft's recipe, after its own train_ddp.py: one replica group of one process, which torchrun starts again.

`TORCHFT_LIGHTHOUSE=... REPLICA_GROUP_ID=0 torchrun --nproc-per-node=1 --max-restarts=100 torchft_job.py HOOK WORKLOAD`

Timeouts and transport are those of train_ddp.py. What it leaves to the user is done as its comments advise: the
position in the data is saved every step, the model now and then.

HOOK `torchft` is its DistributedDataParallel as it is. In torchft 0.2 with gloo, its hook asserts on a future that
does not exist when an all-reduce fails, so survivors die too; `mended` waits for the same all-reduce and goes on.
"""

# no `from __future__ import annotations`: DDP looks at the annotations of a hook, and wants types there, not strings
import itertools
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.utils.data import BatchSampler
from torchft import (  # type: ignore[import-not-found,unused-ignore]
    DistributedDataParallel,
    DistributedSampler,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)
from torchft.checkpointing.pg_transport import PGTransport  # type: ignore[import-not-found,unused-ignore]

from benchmarks.recovery.workload import CommitLog, Workload, save_atomically

REPLICA = int(os.environ["REPLICA_GROUP_ID"])


class Mended(DistributedDataParallel):  # type: ignore[misc,unused-ignore]
    """torchft's wrapper, with survivors that stay alive: the manager sees a failed all-reduce and discards the step."""

    @staticmethod
    def _comm_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        state.allreduce(bucket.buffer()).wait()
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done


HOOKS = {"torchft": DistributedDataParallel, "mended": Mended}


def main() -> None:
    hook, workload = sys.argv[-2], Workload.from_text(sys.argv[-1])
    torch.set_num_threads(1)
    inner_model = workload.model()
    inner = torch.optim.AdamW(inner_model.parameters(), lr=1e-3)
    group = ProcessGroupGloo(timeout=timedelta(seconds=5))
    manager = Manager(
        pg=group,
        min_replica_size=1,
        load_state_dict=lambda state: load(state, inner_model, inner),
        state_dict=lambda: {"model": inner_model.state_dict(), "optim": inner.state_dict()},
        replica_id=f"replica_{REPLICA}",
        timeout=timedelta(seconds=30),
        checkpoint_transport=PGTransport(group, timeout=timedelta(seconds=10), device="cpu"),
    )
    model, optimizer = HOOKS[hook](manager, inner_model), Optimizer(manager, inner)
    if workload.checkpoint.is_file():  # every replica is gone, so the manager has no replica to heal from
        saved = torch.load(workload.checkpoint)
        load(saved, inner_model, inner)
        manager.load_state_dict(saved["torchft"])
    begin_together(workload)
    train(workload, manager, model, optimizer, inner)


def begin_together(workload: Workload) -> None:
    """Wait for all replicas. Otherwise the first replica would make the first steps alone, which would look like
    samples
    lost by kills. A restarted replica finds that all have been there."""
    ready = [Path(workload.directory, f"ready-{replica}") for replica in range(workload.workers)]
    ready[REPLICA].touch()
    while not all(file.is_file() for file in ready):
        time.sleep(0.01)


def load(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optim"])


def train(workload: Workload, manager: Any, model: Any, optimizer: Any, inner: torch.optim.Optimizer) -> None:
    inputs, targets = workload.images()
    rows = CommitLog(workload, REPLICA)
    criterion = nn.CrossEntropyLoss()
    ids: list[int] = []

    def committed(*_: Any) -> None:
        """Only a committed step reaches the inner optimizer. A healing replica takes part with zero gradients."""
        step = manager.current_step()
        rows.add(step - 1, ids if manager.is_participating() else [])
        if step % workload.save_every == 0 and manager.participating_rank() == 0:
            state = {"model": model.module.state_dict(), "optim": inner.state_dict()}
            save_atomically({**state, "torchft": manager.state_dict()}, workload.checkpoint)

    inner.register_step_post_hook(committed)
    for ids in batches(workload):
        optimizer.zero_grad()
        criterion(model(inputs[ids]), targets[ids]).backward()
        optimizer.step()


def batches(workload: Workload) -> Iterator[list[int]]:
    """This replica's batches, from its position when it died. The batch of a discarded step is not repeated."""
    place = Path(workload.directory, f"position-{REPLICA}")
    position = int(place.read_text()) if place.is_file() else 0
    sampler = DistributedSampler(
        range(workload.samples),
        replica_rank=REPLICA,
        num_replica_groups=workload.workers,
        group_rank=0,
        num_replicas=1,
        seed=workload.seed,
    )
    first, skip = divmod(position, workload.steps_per_epoch)
    for epoch in itertools.count(first):
        sampler.set_epoch(epoch)
        for ids in itertools.islice(BatchSampler(sampler, workload.batch_size, drop_last=True), skip, None):
            yield ids
            position += 1
            place.with_suffix(".new").write_text(str(position))
            place.with_suffix(".new").replace(place)
        skip = 0


if __name__ == "__main__":
    main()
