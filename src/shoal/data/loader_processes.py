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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch

from shoal.data.batch import Batch
from shoal.data.source import Ids, format_ids
from shoal.errors import (
    ShoalError,
    describe_exception,
    error,
    error_from_fields,
    fork_error,
    from_os_error,
    traceback_text,
)
from shoal.spec.resolve import user_line
from shoal.spec.run_paths import SEAT_LOCK

BatchKey = tuple[int, ...]
BuildBatch = Callable[[BatchKey, Ids], Batch]

_PR_SET_PDEATHSIG = 1
_UNPICKLABLE_FIX = "Return tensors, numbers, text, and lists, tuples and dicts of them; or set data.loader.workers: 0."


@dataclass(frozen=True)
class LoaderProcess:
    """A loader process and the pipe to it; used by one thread at a time."""

    pid: int
    pipe: Connection


@dataclass
class LoaderSlot:
    """A place for a loader process. `process` is None after a death, until `LoaderPool.restart`."""

    process: LoaderProcess | None


class LoaderDeath(Exception):  # noqa: N818 - the pool starts the process again
    """A loader process is dead. `how` is empty for a batch that another batch's death kept waiting."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


class LoaderPool:
    """Processes that run `build`. A call waits for a free process. Any thread may call.

    A call raises LoaderDeath if its process dies. Then `restart` must be called before the next call.
    """

    def __init__(self, count: int, build: BuildBatch) -> None:
        self._build = build
        self._slots: list[LoaderSlot] = []
        self._idle: queue.SimpleQueue[LoaderSlot] = queue.SimpleQueue()
        for _ in range(count):
            self._slots.append(LoaderSlot(_fork(build)))
            self._idle.put(self._slots[-1])

    @property
    def pids(self) -> list[int]:
        processes = [slot.process for slot in self._slots]  # a side thread may notice a death meanwhile
        return [process.pid for process in processes if process is not None]

    def __call__(self, key: BatchKey, ids: Ids) -> Batch:
        slot = self._idle.get()
        try:
            if slot.process is None:
                raise LoaderDeath("")
            try:
                slot.process.pipe.send((key, ids))
                answer = _receive(slot.process.pipe)
            except (EOFError, OSError) as failure:
                dead, slot.process = slot.process, None
                raise LoaderDeath(_reap(dead)) from failure
        finally:
            self._idle.put(slot)
        if isinstance(answer, Batch):
            return answer
        if isinstance(answer, dict):
            raise error_from_fields(answer)
        raise RuntimeError(f"in a loader process:\n{answer}")

    def restart(self) -> None:
        """Start a process in the place of each dead one. Only for the thread that trains: a fork in another thread
        could copy a lock of torch while the training thread holds it."""
        for slot in self._slots:
            if slot.process is None:
                slot.process = _fork(self._build)

    def find_killer(self, key: BatchKey, ids: Ids) -> int | None:
        """The first sample that ends a loader process by itself; None if it takes several of them."""
        return next((int(ids[i]) for i in range(len(ids)) if self._kills(key, ids[i : i + 1])), None)

    def _kills(self, key: BatchKey, ids: Ids) -> bool:
        while True:
            self.restart()
            try:
                self(key, ids)
            except LoaderDeath as death:
                if death.how:
                    return True
            except (ShoalError, RuntimeError):
                return False
            else:
                return False

    def close(self) -> None:
        """Kill the processes: they hold no state that must be saved."""
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):  # a thread that waited for its answer has noticed its end
                os.waitpid(pid, 0)
        self._slots.clear()


def _reap(dead: LoaderProcess) -> str:
    """How the process ended: "of SIGKILL" or "with exit code 7"."""
    dead.pipe.close()
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(dead.pid, 0)[1])
    except ChildProcessError:  # the user's code waits for all children of the process
        return "of an unknown cause"
    if code >= 0:
        return f"with exit code {code}"
    return f"of {signal.Signals(-code).name}" if -code in list(signal.Signals) else f"of signal {-code}"


# ---- in the loader process ----


def _fork(build: BuildBatch) -> LoaderProcess:
    parent = os.getpid()
    sys.stdout.flush()  # otherwise the child would write the buffered text again
    sys.stderr.flush()
    try:
        ours, theirs = Pipe()
        pid = os.fork()
    except OSError as failure:
        raise fork_error(failure) from failure
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
    _close_inherited(keep=pipe)
    torch.set_num_threads(1)


def _close_inherited(*, keep: int) -> None:
    """Close inherited sockets and the lock of the worker's seat, so that both end with the parent. Their descriptor
    numbers stay in use, because inherited objects refer to them."""
    with suppress(OSError):
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):
                is_socket = stat.S_ISSOCK(os.fstat(number).st_mode)
                if number != keep and (is_socket or _is_seat_lock(number)):
                    os.dup2(nothing, number)


def _is_seat_lock(descriptor: int) -> bool:
    return SEAT_LOCK.fullmatch(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))) is not None


def _serve(pipe: Connection, build: BuildBatch) -> None:
    while True:
        try:
            key, ids = pipe.recv()
        except (EOFError, OSError):
            return
        answer = _build_or_error(build, key, ids)
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            _send(pipe, answer)
        except OSError:
            return
        except BaseException as failure:
            what = f"samples {format_ids(ids)} cannot be sent from a loader process: {describe_exception(failure)}"
            _send(pipe, error("SH309", what, where=user_line(failure), fix=_UNPICKLABLE_FIX).to_fields())


def _build_or_error(build: BuildBatch, key: BatchKey, ids: Ids) -> Any:
    try:
        return build(key, ids)
    except ShoalError as failure:
        return failure.to_fields()
    except BaseException as failure:
        limit = from_os_error(failure)
        return limit.to_fields() if limit else traceback_text(failure)


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
