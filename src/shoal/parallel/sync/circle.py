"""A process group of torch's that one can walk away from.

Nothing wakes a thread that waits inside gloo: not `abort`, not `shutdown`. So the group lives in a thread of its own,
from the first connection to the last; whoever asks it for something waits for an answer, and that wait can be ended.
Nothing global remains: no default group, no environment variable.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from shoal.wire.handshake import LinkError

MEETING_TIME = timedelta(seconds=30)
TALKING_TIME = timedelta(minutes=10)
"""Nobody waits so long: it is when a group that was left alone gives up."""

Act = Callable[[distributed.ProcessGroup], None]


class Circle:
    """Of `size` members, this is number `rank`. They meet at `port` of `host`, where the first one has a `listener`;
    `own_host` is where the others reach this one."""

    def __init__(
        self,
        backend: str,
        rank: int,
        size: int,
        *,
        host: str,
        port: int,
        own_host: str,
        device: torch.device,
        listener: socket.socket | None = None,
    ) -> None:
        self._backend = backend
        self._rank, self._size = rank, size
        self._where = (host, port, own_host)
        self._device = device
        self._listener = listener
        self._group: Any = None
        self._asked: queue.SimpleQueue[tuple[Act, Future[None]] | None] = queue.SimpleQueue()
        self._guard = threading.Lock()
        self._answer: Future[None] | None = None
        self._left = False
        self._thread = threading.Thread(target=self._live, name="shoal-circle", daemon=True)
        self._thread.start()

    def ask(self, act: Act) -> None:
        """Let the circle's thread do it. LinkError if it fails, or if this member has left, now or meanwhile."""
        answer: Future[None] = Future()
        with self._guard:
            if self._left:
                raise LinkError("left")
            self._answer = answer
            self._asked.put((act, answer))
        try:
            answer.result()
        except CancelledError:
            raise LinkError("left") from None
        except RuntimeError as failure:  # what torch raises for everything
            raise LinkError(f"{self._backend}: {str(failure).splitlines()[0]}") from failure

    def leave(self) -> None:
        """From any thread, at once: whoever waits is woken. The connections are closed when the circle's thread is done
        with what it does, which lets the other members know."""
        with self._guard:
            self._left = True
            self._asked.put(None)
            if self._answer:
                self._answer.cancel()
            if self._group is not None and self._backend == "nccl":
                self._group.abort()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    # Below is the thread's own.

    def _live(self) -> None:
        with torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext():
            begin: Act | None = self._meet
            while (one := self._asked.get()) is not None:
                act, answer = one
                with contextlib.suppress(InvalidStateError):  # whoever asked has left
                    try:
                        if begin:
                            begin, _ = None, begin(self._group)
                        act(self._group)
                    except Exception as failure:
                        answer.set_exception(failure)
                    else:
                        answer.set_result(None)
