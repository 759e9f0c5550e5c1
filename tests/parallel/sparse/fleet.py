"""Real servers and workers as in the tests of servers, with a model that has sparse tables."""

import contextlib
import functools
import tempfile
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import nn

from shoal.parallel.clipping import Clipping
from shoal.parallel.replica import Replica
from shoal.parallel.sparse.module import SparseTable
from shoal.parallel.sync.base import Discarded
from shoal.wire.handshake import LinkError
from tests.parallel.server import harbour as harbours
from tests.parallel.server.cargo import Cargo
from tests.parallel.server.harbour import Harbour

ROWS = 100_000


class Words(nn.Module):
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
class Wordy(Cargo):
    def replica(self):
        torch.manual_seed(0)
        model = Words()
        optimizer = self.kind(model.parameters(), lr=1e-2)
        made = Replica(model, optimizer, self._loss, seed=1, clipping=Clipping(norm=self.norm, value=self.value))
        made.probe(self.batch(0, 0))
        return made


@contextlib.contextmanager
def sparse():
    """Harbours whose workers bring back what rows there are, and whose servers show theirs."""
    step, train, dump = harbours.one_step, harbours._train, harbours._dump

    def one_step(replica, *rest, **more):
        try:
            return step(replica, *rest, **more)
        except LinkError as failure:
            replica.undo()
            return Discarded(str(failure))

    def with_rows(harbour, sync, *rest):
        at, outcome = train(harbour, sync, *rest)
        if isinstance(outcome, str):
            return at, outcome
        rows = sync.seal()
        return (at, rows.why) if isinstance(rows, Discarded) else (at, outcome | {"rows": rows})

    def with_shelf(host):
        found, shelf = dump(host), host.keeper.shard.shelf
        for i in found["chunks"]:
            for kind, table, rows in shelf.take_all(i, i + 1):
                found["chunks"][i] += bytes([kind, table]) + rows.keys.tobytes() + rows.values.tobytes()
        return found

    with (
        tempfile.TemporaryDirectory() as place,
        patch.object(harbours, "Terms", functools.partial(harbours.Terms, store=place)),
        patch.object(harbours, "one_step", one_step),
        patch.object(harbours, "_train", with_rows),
        patch.object(harbours, "_dump", with_shelf),
    ):
        yield


@functools.cache
def alone(cargo, steps):
    """What one worker and one server make of it."""
    with sparse(), Harbour(cargo, workers=1, servers=1, backups=0, steps=steps) as harbour:
        (result,) = harbour.sail().values()
        return result["sha256"], result["rows"]


def check(harbour, results):
    assert {(result["sha256"], result["rows"]) for result in results.values()} == {alone(harbour.cargo, harbour.steps)}
