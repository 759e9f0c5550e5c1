"""A process that forks savers: `kill` ones that save in a loop until they are killed, `share` ones that end.

Importing torch once and forking keeps the tests fast. A line of input `kill <path> <first step>` or
`share <path> <name> <saves>` starts a saver; each answers `<pid>` and then a line per event on stdout.
"""

from __future__ import annotations

import os
import sys

import torch

from shoal.checkpoint.store import CheckpointStore
from shoal.errors import ShoalError


def emit(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def state(step: int) -> dict[str, object]:
    made = torch.Generator().manual_seed(step)
    large = {f"large{i}": torch.randn(20_000, generator=made) for i in range(3)}
    return {"model": {"frozen": torch.arange(30_000), **large, "small": torch.tensor([step])}, "step": step}


def save_until_killed(path: str, first: str) -> None:
    def emit_step(kind: str, /, **fields: object) -> None:
        emit(kind, fields["step"])

    store = CheckpointStore(path, job_sha256="job", every=("steps", 1), keep=2, emit=emit_step)
    for step in range(int(first), 1_000_000):
        store.save(step, state(step))


def save_to_shared_store(path: str, name: str, saves: str) -> None:
    """Values come round again, so that the blobs one fold drops are the ones that another is about to use."""
    failed: list[object] = []
    store = CheckpointStore(
        path, job_sha256=None, keep=1, keep_best=0, name=name, emit=lambda kind, **f: failed.append((kind, f))
    )
    for step in range(int(saves)):
        value = (step * (3 if name.endswith("0") else 5)) % 7
        store.save(step, {"w": torch.full((20_000,), float(value)), "v": torch.full((20_000,), float(-step))})
        store.wait()
        try:
            _, found = store.load(step)
            assert (found["w"] == value).all()
        except ShoalError as problem:
            failed.append(("lost", {"step": step, "problem": str(problem)}))
    emit("end", name, *[row for row in failed if row[0] != "saved"])


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        verb, *words = line.split()
        ready, go = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.read(ready, 1)
            try:
                {"kill": save_until_killed, "share": save_to_shared_store}[verb](*words)
            except Exception as problem:
                emit("end", "crashed", repr(problem))
            os._exit(0)
        emit("pid", pid)
        os.write(go, b"!")
        if verb == "kill":
            os.waitpid(pid, 0)
            emit("dead", pid)


if __name__ == "__main__":
    main()
