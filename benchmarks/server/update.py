"""The time of the update on a server, piece by piece, without pushes."""

from __future__ import annotations

import sys
from functools import partial

import torch

from benchmarks.server import model
from benchmarks.server.protocol import serve, timed
from benchmarks.server.setting import Setting
from shoal.paramserver.chunk_state import chunk_state_from_replica, group_hyperparameters, param_group_indices
from shoal.paramserver.chunk_store import ChunkStore
from shoal.spec.chunk_table import ChunkTable, build_pieces
from shoal.spec.view import Address


def main() -> None:
    setting = Setting.from_text(sys.argv[1])
    replica = model.replica(setting)
    layout, hyper = replica.layout, group_hyperparameters(replica.optimizer)
    kind = type(replica.optimizer)
    shard = ChunkStore(layout, optimizer=kind, groups=param_group_indices(replica), hyper=hyper, lanes=1)
    shard.write_state(0, shard.chunk_count, chunk_state_from_replica(replica, layout, 0, shard.chunk_count))
    shard.sums.tensor[: layout.tail].view(torch.float32).normal_()
    shard.sums.tensor[layout.tail :] = 0
    chains = [[0]] * shard.chunk_count
    address = Address(host="nobody", port=1)
    table = ChunkTable(
        number=1, cuts=layout.chunk_offsets, chains=chains, filling=[[]] * len(chains), addresses={0: address}
    )
    ranges = [(piece.first_chunk, piece.end_chunk) for piece in build_pieces(table)]
    shard.set_pieces(ranges)

    def once() -> None:
        for first, last in ranges:
            shard.apply(first, last, hyper=hyper)

    serve(partial(timed, act=once))


if __name__ == "__main__":
    main()
