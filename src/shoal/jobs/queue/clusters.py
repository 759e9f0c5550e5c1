"""Where the jobs of a queue run: what an engine has, or the machines that offer their cores to the daemon."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.fleet.engines.host_use import HostUse
from shoal.fleet.engines.make import capacity_of
from shoal.jobs.queue.daemon import ClusterPool, Prepare
from shoal.jobs.queue.network.server import QueueServer, bind
from shoal.jobs.queue.queue_file import QueuePaths
from shoal.plan.queueing.shares import CoreCapacity
from shoal.spec.certificates import load_tls_contexts
from shoal.spec.engine import EngineConfig, LocalEngineConfig, MachinesEngineConfig


@dataclass(frozen=True)
class Listening:
    """Where the daemon listens for users and machines. `tls` has cert.pem, key.pem and ca.pem."""

    address: str
    tls: Path | None = None


class EngineCluster:
    """The machines of an engine. It decides itself where a worker goes, and tells in `hosts` which are lost."""

    def __init__(self, engine: EngineConfig, hosts: HostUse) -> None:
        self._engine = engine
        self._hosts = hosts
        self._names = {node.name for node in capacity_of(engine)}
        self._missing: set[str] = set()

    def capacity(self) -> CoreCapacity:
        nodes = capacity_of(self._engine)
        here = [node for node in nodes if not self._hosts.is_missing(node.name)]
        return CoreCapacity(
            {node.name: node.cores if node.seats is None else node.seats for node in here},
            memory_bytes={node.name: node.memory_bytes for node in here if node.memory_bytes},  # 0: unknown
            seats=any(node.seats is not None for node in nodes),
            lost=tuple(node.name for node in nodes if self._hosts.is_lost(node.name)),
        )

    def has_changed(self) -> bool:
        before, self._missing = self._missing, {name for name in self._names if self._hosts.is_missing(name)}
        return self._missing != before

    def place(self, wanted: Mapping[str, Sequence[str]]) -> None:
        pass


@contextlib.contextmanager
def open_cluster(
    paths: QueuePaths,
    engine: EngineConfig | None,
    listening: Listening | None,
    *,
    hosts: HostUse,
    show: Callable[[str], None],
) -> Iterator[tuple[ClusterPool, Prepare]]:
    """The cluster, and what makes a job run there. Without an engine each job has its own. `hosts` is what the engines
    of its runs know."""
    if listening is None:
        setter: Prepare = (lambda job: job) if engine is None else lambda job: job.model_copy(update={"engine": engine})
        yield EngineCluster(engine or LocalEngineConfig(), hosts), setter
        return
    tls = listening.tls.resolve() if listening.tls else None
    contexts = load_tls_contexts(tls, where="--tls") if tls else None
    with contextlib.closing(
        QueueServer(paths, bind(listening.address, tls=tls is not None), tls_contexts=contexts)
    ) as server:
        show(f"listens at {server.address}: users submit there, and machines offer their cores")
        yield server.pool, _machine_setter(server, tls)


def _machine_setter(server: QueueServer, tls: Path | None) -> Prepare:
    """Workers come from other machines: the driver of each run listens where the queue does, with its certificates."""
    engine = MachinesEngineConfig(kind="machines", daemon=str(server.door))
    own = {"listen": server.host, "port": None, "advertise": None, "tls": str(tls) if tls else None}
    return lambda job: job.model_copy(update={"engine": engine, "network": job.network.model_copy(update=own)})
