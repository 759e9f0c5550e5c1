"""Where the jobs of a queue run: what an engine has, or the machines that offer their cores to the daemon."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True)
class EngineCluster:
    """The machines of an engine. It decides itself where a worker goes."""

    engine: EngineConfig

    def capacity(self) -> CoreCapacity:
        nodes = capacity_of(self.engine)
        return CoreCapacity(
            {node.name: node.cores for node in nodes},
            memory_bytes={node.name: node.memory_bytes for node in nodes if node.memory_bytes},  # 0: unknown
        )

    def has_changed(self) -> bool:
        return False

    def place(self, wanted: Mapping[str, Sequence[str]]) -> None:
        pass


@contextlib.contextmanager
def open_cluster(
    paths: QueuePaths, engine: EngineConfig | None, listening: Listening | None, *, show: Callable[[str], None]
) -> Iterator[tuple[ClusterPool, Prepare]]:
    """The cluster, and what makes a job run there. Without an engine each job has its own."""
    if listening is None:
        setter: Prepare = (lambda job: job) if engine is None else lambda job: job.model_copy(update={"engine": engine})
        yield EngineCluster(engine or LocalEngineConfig()), setter
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
