"""A synchronous parameter server over torch's RPC, as in its tutorial on batched requests: each server adds up what
comes, and the last push of a round answers all of them.

`tcp` is TensorPipe over sockets; otherwise it picks its own way, which on one host is shared memory.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.futures import Future

from benchmarks.server import processes
from benchmarks.server.protocol import serve, timed
from benchmarks.server.setting import Setting


class Server:
    """Holds a part of the parameters."""

    def __init__(self, setting: Setting) -> None:
        self._lock = threading.Lock()
        self._workers = setting.workers
        self._part = torch.nn.Parameter(torch.zeros(setting.floats // setting.servers))
        kind = getattr(torch.optim, setting.optimizer)
        self._optimizer = kind([self._part], lr=1e-4, fused=True)
        self._grad: Tensor | None = None
        self._came = 0
        self._answer: Future[Tensor] = Future()

    def push(self, grad: Tensor) -> Future[Tensor]:
        with self._lock:
            answer = self._answer
            self._grad = grad if self._grad is None else self._grad.add_(grad)
            self._came += 1
            if self._came == self._workers:
                self._part.grad = self._grad
                self._optimizer.step()
                self._grad, self._came, self._answer = None, 0, Future()
                answer.set_result(self._part.detach())
        return answer


_server: Server


@rpc.functions.async_execution
def push(grad: Tensor) -> Future[Tensor]:
    return _server.push(grad)


def main() -> None:
    setting = Setting.from_text(sys.argv[1])
    processes.prepare()
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch:
        meeting = f"file://{scratch}/meeting"
        for i in range(setting.servers):
            processes.start(_serve, i, meeting, setting)
        serve(processes.lockstep_rounds([processes.start(_work, i, meeting, setting) for i in range(setting.workers)]))


def _enter(name: str, rank: int, meeting: str, setting: Setting) -> None:
    torch.set_num_threads(1)
    ways: Any = {"_transports": ["uv"], "_channels": ["basic"]} if setting.way == "tcp" else {}
    options = rpc.TensorPipeRpcBackendOptions(init_method=meeting, **ways)
    rpc.init_rpc(name, rank=rank, world_size=setting.servers + setting.workers, rpc_backend_options=options)


def _serve(pipe: Connection, number: int, meeting: str, setting: Setting) -> None:
    global _server
    _server = Server(setting)
    _enter(f"server-{number}", number, meeting, setting)
    threading.Event().wait()


def _work(pipe: Connection, number: int, meeting: str, setting: Setting) -> None:
    _enter(f"worker-{number}", setting.servers + number, meeting, setting)
    grads = torch.randn(setting.floats).chunk(setting.servers)
    parts = torch.zeros(setting.floats).chunk(setting.servers)

    def once() -> None:
        asked = [rpc.rpc_async(f"server-{i}", push, args=(grad,)) for i, grad in enumerate(grads)]
        for part, answer in zip(parts, asked, strict=True):
            part.copy_(answer.wait())

    while True:
        pipe.send(timed(pipe.recv(), once))


if __name__ == "__main__":
    main()
