"""What the update itself takes on a server, piece by piece, without anybody who pushes."""

from __future__ import annotations

import sys
from functools import partial

import torch

from benchmarks.server import model
from benchmarks.server.protocol import serve, timed
from benchmarks.server.setting import Setting
from shoal.parallel.server.chunks import groups_of, hyper_of, scatter
from shoal.parallel.server.shard import Shard
from shoal.spec.table import Table, pieces
from shoal.spec.view import Address


def main() -> None:
    setting = Setting.from_text(sys.argv[1])
    replica = model.replica(setting)
    layout, hyper = replica.layout, hyper_of(replica.optimizer)
    kind = type(replica.optimizer)
    shard = Shard(layout, optimizer=kind, groups=groups_of(replica), hyper=hyper, lanes=1)
    shard.put(0, shard.chunks, scatter(replica, layout, 0, shard.chunks))
    shard.sums.tensor[: layout.tail].view(torch.float32).normal_()
    shard.sums.tensor[layout.tail :] = 0
    chains = [[0]] * shard.chunks
    address = Address(host="nobody", port=1)
    table = Table(number=1, cuts=layout.cuts, chains=chains, filling=[[]] * len(chains), addresses={0: address})
    ranges = [(piece.first, piece.last) for piece in pieces(table)]
    shard.arrange(ranges)

    def once() -> None:
        for first, last in ranges:
            shard.apply(first, last, hyper=hyper)

    serve(partial(timed, act=once))


if __name__ == "__main__":
    main()
