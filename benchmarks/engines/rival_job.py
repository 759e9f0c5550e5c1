"""What the rivals train: the same small model by DistributedDataParallel, with a checkpoint now and then.

Each rank appends a row for each step to FILE: time, step, pid. After a restart it goes on from the newest checkpoint.
`torchrun ... rival_job.py DIR`, or `train(directory)` inside a worker of Ray Train.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SAVE_EVERY = 200
BATCH = 32


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]))


def train(directory: Path) -> None:
    """Until the process is killed."""
    data = load_digits()
    inputs = torch.as_tensor(data.data, dtype=torch.float32)
    targets = torch.as_tensor(data.target, dtype=torch.long)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    checkpoint = directory / "checkpoint.pt"
    step = 0
    if checkpoint.is_file():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = int(saved["step"])
    rank = dist.get_rank()
    with (directory / f"steps-{rank}.jsonl").open("a", buffering=1) as rows:
        while not (directory / "stop").exists():
            first = (step * 2 + rank) * BATCH % (len(inputs) - BATCH)
            optimizer.zero_grad()
            chosen = slice(first, first + BATCH)
            torch.autograd.backward(nn.functional.cross_entropy(model(inputs[chosen]), targets[chosen]))
            optimizer.step()
            step += 1
            rows.write(json.dumps({"t": time.time(), "step": step, "pid": os.getpid()}) + "\n")
            if step % SAVE_EVERY == 0 and rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, temporary := checkpoint.with_suffix(".tmp"))
                temporary.replace(checkpoint)


if __name__ == "__main__":
    main()
