"""Real servers and workers as in the tests of servers, with a model that has sparse tables."""

import contextlib
import functools
import tempfile
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import nn

from shoal.checkpoint.files import LocalFiles
from shoal.collectives.outcome import Discarded
from shoal.lanes.clipping import Clipping
from shoal.lanes.replica import Replica
from shoal.lanes.sparse.embedding import SparseTable
from shoal.net.errors import LinkError
from tests.paramserver import cluster as clusters
from tests.paramserver.cluster import Cluster
from tests.paramserver.workloads import Workload

ROWS = 100_000


class SparseModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = SparseTable(ROWS, 6, lr=0.2)
        self.few = SparseTable(30, 3, optimizer="adagrad")
        self.norm = nn.BatchNorm1d(9)
        self.out = nn.Linear(9, 5)

    def forward(self, x):
        ids = (x * 3).long()
        words = self.words(ids * 7919 % ROWS).sum(1)
        return self.out(self.norm(torch.cat([words, self.few(ids[:, ::5] % 30).sum(1)], 1)))


@dataclass(frozen=True)
class SparseWorkload(Workload):
    def replica(self):
        torch.manual_seed(0)
        model = SparseModel()
        optimizer = self.optimizer_class(model.parameters(), lr=1e-2)
        made = Replica(model, optimizer, self._loss, seed=1, clipping=Clipping(norm=self.norm, value=self.value))
        made.probe(self.batch(0, 0))
        return made


@contextlib.contextmanager
def sparse_cluster_patches():
    """Clusters whose workers bring back what rows there are, and whose servers show theirs."""
    step, train, dump = clusters.one_step, clusters._train, clusters._dump

    def one_step(replica, *rest, **more):
        try:
            return step(replica, *rest, **more)
        except LinkError as failure:
            replica.undo_step()
            return Discarded(str(failure))

    def with_rows(cluster, sync, *rest):
        at, outcome = train(cluster, sync, *rest)
        if isinstance(outcome, str):
            return at, outcome
        rows = sync.external_sha256()
        return (at, rows.why) if isinstance(rows, Discarded) else (at, outcome | {"rows": rows})

    def with_row_tables(server_loop):
        found, row_tables = dump(server_loop), server_loop.server.chunk_store.row_tables
        for i in found["chunks"]:
            for kind, table, rows in row_tables.read_bundles(i, i + 1):
                found["chunks"][i] += bytes([kind, table]) + rows.keys.tobytes() + rows.values.tobytes()
        return found

    with (
        tempfile.TemporaryDirectory() as place,
        patch.object(clusters, "ServerConfig", functools.partial(clusters.ServerConfig, checkpoints=LocalFiles(place))),
        patch.object(clusters, "one_step", one_step),
        patch.object(clusters, "_train", with_rows),
        patch.object(clusters, "_dump", with_row_tables),
    ):
        yield


@functools.cache
def single_worker_and_server(workload, steps):
    """What one worker and one server make of it."""
    with sparse_cluster_patches(), Cluster(workload, workers=1, servers=1, backups=0, steps=steps) as cluster:
        (result,) = cluster.train().values()
        return result["sha256"], result["rows"]


def assert_exact(cluster, results):
    assert {(result["sha256"], result["rows"]) for result in results.values()} == {
        single_worker_and_server(cluster.workload, cluster.steps)
    }
