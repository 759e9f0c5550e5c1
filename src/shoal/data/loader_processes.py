"""Loader processes: forks of the worker that build batches in parallel.

Not torch's DataLoader: its processes would keep the worker's sockets open, so that peers would not see the worker
exit, and they would inherit its signal handlers.
"""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import queue
import signal
import stat
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch

from shoal.data.batch import Batch
from shoal.data.source import Ids
from shoal.errors import ShoalError, error, error_from_fields

BatchKey = tuple[int, ...]
BuildBatch = Callable[[BatchKey, Ids], Batch]

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class LoaderProcess:
    """A loader process and the pipe to it; used by one thread at a time."""

    pid: int
    pipe: Connection


class LoaderPool:
    """Processes that run `build`. A call waits for a free process. Any thread may call."""

    def __init__(self, count: int, build: BuildBatch) -> None:
        self._processes: list[LoaderProcess] = []
        self._idle: queue.SimpleQueue[LoaderProcess] = queue.SimpleQueue()
        for _ in range(count):
            loader = _fork(build)
            self._processes.append(loader)
            self._idle.put(loader)

    def __call__(self, key: BatchKey, ids: Ids) -> Batch:
        loader = self._idle.get()
        try:
            loader.pipe.send((key, ids))
            answer = _receive(loader.pipe)
        except (EOFError, OSError) as failure:
            raise _death_error(loader, ids) from failure
        finally:
            self._idle.put(loader)
        if isinstance(answer, Batch):
            return answer
        if isinstance(answer, dict):
            raise error_from_fields(answer)
        raise RuntimeError(f"in a loader process:\n{answer}")

    def close(self) -> None:
        """Kill the processes: they hold no state that must be saved."""
        for loader in self._processes:
            with suppress(ProcessLookupError):
                os.kill(loader.pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(loader.pid, 0)
        self._processes.clear()


def _death_error(loader: LoaderProcess, ids: Ids) -> ShoalError:
    how = ""
    with suppress(ChildProcessError):
        # `close` reaps the dead process: until then no other process gets its pid.
        end = os.waitid(os.P_PID, loader.pid, os.WEXITED | os.WNOWAIT)
        if end is not None and end.si_code == os.CLD_EXITED:
            how = f" with exit code {end.si_status}"
        elif end is not None:
            how = f" of {signal.Signals(end.si_status).name}"
    shown = ", ".join(map(str, ids[:8])) + (", …" if len(ids) > 8 else "")
    return error("SH312", f"a loader process died{how} while it built samples [{shown}]")


# ---- in the loader process ----


def _fork(build: BuildBatch) -> LoaderProcess:
    ours, theirs = Pipe()
    parent = os.getpid()
    sys.stdout.flush()  # otherwise the child would write the buffered text again
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        theirs.close()
        return LoaderProcess(pid, ours)
    try:
        _detach_from_parent(theirs.fileno(), parent)
        _serve(theirs, build)
    finally:
        os._exit(0)


def _detach_from_parent(pipe: int, parent: int) -> None:
    """Close what the fork shares with its parent, and make it die with its parent."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    _close_sockets(keep=pipe)
    torch.set_num_threads(1)


def _close_sockets(*, keep: int) -> None:
    """Close inherited sockets, so that they close when the parent closes them. Their descriptor numbers stay in use,
    because inherited objects refer to them."""
    with suppress(OSError):
        nothing = os.open(os.devnull, os.O_RDWR)
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if int(name) != keep and stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    os.dup2(nothing, int(name))


def _serve(pipe: Connection, build: BuildBatch) -> None:
    while True:
        try:
            key, ids = pipe.recv()
        except (EOFError, OSError):
            return
        answer = _build_or_error(build, key, ids)
        sys.stdout.flush()
        sys.stderr.flush()
        _send(pipe, answer)


def _build_or_error(build: BuildBatch, key: BatchKey, ids: Ids) -> Any:
    try:
        return build(key, ids)
    except ShoalError as failure:
        return failure.to_fields()
    except Exception:
        return traceback.format_exc()


# ---- batches through a pipe ----


class _Pickler(pickle.Pickler):
    """Pickles tensors as numpy arrays, whose bytes are sent without a copy."""

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is torch.Tensor and thing.device.type == "cpu" and not thing.requires_grad:
            with suppress(TypeError, RuntimeError):  # bfloat16 and sparse tensors use torch's own pickling
                return torch.from_numpy, (thing.numpy(),)
        return NotImplemented


def _send(pipe: Connection, answer: Any) -> None:
    buffers: list[pickle.PickleBuffer] = []
    head = io.BytesIO()
    _Pickler(head, protocol=5, buffer_callback=buffers.append).dump(answer)
    raw = [buffer.raw() for buffer in buffers]
    pipe.send((head.getvalue(), [part.nbytes for part in raw]))
    for part in raw:
        pipe.send_bytes(part)


def _receive(pipe: Connection) -> Any:
    head, sizes = pipe.recv()
    buffers = [bytearray(size) for size in sizes]
    for buffer in buffers:
        pipe.recv_bytes_into(buffer)
    return pickle.loads(head, buffers=buffers)  # noqa: S301  (from a fork of ours)
