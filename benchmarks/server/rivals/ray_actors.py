"""A synchronous parameter server of Ray actors, as in Ray's own example: workers take weights and return gradients,
servers take gradients and return weights. Objects go through Ray's shared memory, which readers map."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import numpy as np
import ray
import torch

from benchmarks.server.protocol import serve, timed
from benchmarks.server.setting import Setting


class Server:
    """Holds a part of the parameters."""

    def __init__(self, setting: Setting) -> None:
        torch.set_num_threads(1)
        self._part = torch.nn.Parameter(torch.zeros(setting.floats // setting.servers))
        kind = getattr(torch.optim, setting.optimizer)
        self._optimizer = kind([self._part], lr=1e-4, fused=True)

    def apply(self, *grads: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        total = torch.from_numpy(grads[0])
        for grad in grads[1:]:
            total = total + torch.from_numpy(grad)
        self._part.grad = total
        self._optimizer.step()
        return self._part.detach().numpy()


class Worker:
    def __init__(self, setting: Setting) -> None:
        self._values = np.zeros(setting.floats, dtype=np.float32)
        self._grads = np.array_split(np.random.randn(setting.floats).astype(np.float32), setting.servers)

    def gradients(self, *weights: np.ndarray[Any, Any]) -> Any:
        np.concatenate(weights, out=self._values)
        return self._grads[0] if len(self._grads) == 1 else tuple(self._grads)


def main() -> None:
    setting = Setting.from_text(sys.argv[1])
    ray.init(num_cpus=setting.workers + setting.servers, include_dashboard=False, log_to_driver=False)
    servers = [ray.remote(Server).remote(setting) for _ in range(setting.servers)]
    workers = [ray.remote(Worker).remote(setting) for _ in range(setting.workers)]
    weights = [ray.put(np.zeros(setting.floats // setting.servers, dtype=np.float32)) for _ in servers]

    def once() -> None:
        nonlocal weights
        found = [worker.gradients.options(num_returns=len(servers)).remote(*weights) for worker in workers]
        columns = [[one] for one in found] if len(servers) == 1 else found
        weights = [
            server.apply.remote(*grads) for server, grads in zip(servers, zip(*columns, strict=True), strict=True)
        ]
        ray.wait(weights, num_returns=len(weights))

    serve(partial(timed, act=once))
    ray.shutdown()


if __name__ == "__main__":
    main()
