"""Plain torch on two hosts: DistributedDataParallel over gloo, or two processes without communication.

The loop is the fastest hand-written loop that we know: everything in memory, nothing saved.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.links.hosts import INTERFACE
from benchmarks.links.models import BATCH, CONTEXT, LR, MODELS
from benchmarks.links.samples import IMAGES, LABELS, TEXT
from benchmarks.links.traffic import connected, keep_busy
from benchmarks.overhead.samples import read_idx

Pair = tuple[Tensor, Tensor]


def main() -> None:
    asked = json.loads(sys.argv[-1])
    rank = int(sys.argv[sys.argv.index("--seat") + 1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: nn.Module = MODELS[asked["model"]]()
    if asked["traffic"]:
        keep_busy(rank)
    meet = meeting(rank) if asked["meet"] else None
    if asked["talk"]:
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        dist.init_process_group("gloo", init_method=f"file://{asked['reports']}/meeting", rank=rank, world_size=2)
        model = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    inputs, targets = arrays(Path(asked["data"]), asked["model"])
    half = BATCH[asked["model"]] // 2
    train(model, inputs, targets, batch_size=half, rank=rank, report=Path(asked["reports"]), meet=meet)


def train(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    *,
    batch_size: int,
    rank: int,
    report: Path,
    meet: Callable[[], None] | None,
) -> None:
    """Train until the process is killed, and write a row for each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    criterion, order = nn.CrossEntropyLoss(), torch.Generator().manual_seed(rank)
    with (report / f"rank-{rank}.rows").open("w", buffering=1) as rows:
        while True:
            ids = torch.randint(len(inputs), (batch_size,), generator=order)
            loss = criterion(model(inputs.index_select(0, ids)), targets.index_select(0, ids))
            optimizer.zero_grad()
            loss.backward()
            if meet:
                meet()
            optimizer.step()
            rows.write(f"{time.time()} {batch_size}\n")


def meeting(rank: int) -> Callable[[], None]:
    """A function that waits until the other process has reached the same step: one byte each way."""
    sock = connected(rank)
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def meet() -> None:
        sock.sendall(b".")
        if not sock.recv(1):
            sys.exit("the other process is gone")

    return meet


def arrays(data: Path, model: str) -> Pair:
    if model == "gpt":
        letters = np.frombuffer((data / TEXT).read_bytes(), np.uint8)
        tokens = torch.from_numpy(np.unique(letters, return_inverse=True)[1])
        windows = tokens.unfold(0, CONTEXT + 1, 1)
        return windows[:, :-1], windows[:, 1:]
    images = torch.from_numpy(read_idx(data / IMAGES).copy())[:, None].float() / 255
    return images, torch.from_numpy(read_idx(data / LABELS).astype(np.int64))


if __name__ == "__main__":
    main()
