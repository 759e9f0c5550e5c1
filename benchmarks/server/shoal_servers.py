"""Shoal: server and worker processes as in a run, with a chunk table and a view made by hand.

A round is what `ParameterServerSync.commit` does once the gradients are there: copy them to where they are sent from,
push, wait for all workers, copy the new values into the model.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from benchmarks.server import model, processes
from benchmarks.server.protocol import serve, timed
from benchmarks.server.setting import Setting
from shoal.collectives.group import ViewGroup
from shoal.collectives.outcome import Committed
from shoal.collectives.transport.endpoint import Endpoint
from shoal.paramserver.event_loop import ServerLoop
from shoal.paramserver.server import ServerConfig
from shoal.spec.chunk_table import ChunkTable
from shoal.spec.view import Address, View
from shoal.strategies.parameter_server_sync import ParameterServerSync

TOKEN = "a token for one run of a benchmark"
FIRST_SERVER = 100


def main() -> None:
    setting = Setting.from_text(sys.argv[1])
    processes.prepare()
    with processes.hosts_for(setting.servers + setting.workers, setting.mbit) as places:
        _run_cluster(setting, places[: setting.servers], places[setting.servers :])


def _run_cluster(
    setting: Setting, server_hosts: Sequence[processes.EnterHost], worker_hosts: Sequence[processes.EnterHost]
) -> None:
    servers = {
        FIRST_SERVER + i: processes.start(_serve, place, FIRST_SERVER + i, setting)
        for i, place in enumerate(server_hosts)
    }
    workers = [processes.start(_work, place, seat, setting) for seat, place in enumerate(worker_hosts)]
    addresses = {seat: _as_remote(pipe.recv(), setting) for seat, pipe in servers.items()}
    found = [pipe.recv() for pipe in workers]
    table = _table(found[0][1], addresses, setting.backups)
    carries = {seat: [seat] for seat in range(setting.workers)}
    view = View(number=1, carries=carries, addresses={i: it[0] for i, it in enumerate(found)}, saver=0)
    for pipe in servers.values():
        pipe.send(table)
    for pipe in workers:
        pipe.send((table, view))
    serve(processes.lockstep_rounds(workers))


def _as_remote(address: Address, setting: Setting) -> Address:
    """The address as seen from another host, if TCP is measured."""
    return address if setting.way == "shm" else address.model_copy(update={"host_id": "another", "unix": ""})


def _table(cuts: Sequence[int], addresses: dict[int, Address], backups: int) -> ChunkTable:
    """Equal shares; the backups of a chunk are on the servers after its primary."""
    seats, chunks = list(addresses), len(cuts) - 1
    length = min(backups + 1, len(seats))
    chains = [[seats[(i * len(seats) // chunks + j) % len(seats)] for j in range(length)] for i in range(chunks)]
    return ChunkTable(number=1, cuts=list(cuts), chains=chains, filling=[[] for _ in chains], addresses=addresses)


def _serve(pipe: Connection, enter_host: processes.EnterHost, seat: int, setting: Setting) -> None:
    torch.set_num_threads(1)
    terms = ServerConfig(setting.workers, 0, getattr(torch.optim, setting.optimizer))
    host = ServerLoop(seat, TOKEN, terms, bind=enter_host())
    pipe.send(host.endpoint.address)
    threading.Thread(target=lambda: host.set_chunk_table(pipe.recv()), daemon=True).start()
    host.run()


def _work(pipe: Connection, enter_host: processes.EnterHost, seat: int, setting: Setting) -> None:
    address = enter_host()
    replica = model.replica(setting)
    endpoint = Endpoint(TOKEN, bind=address)
    sync = ParameterServerSync(setting.workers, replica, group=ViewGroup(endpoint, TOKEN), token=TOKEN, staleness=0)
    pipe.send((endpoint.address, sync.chunk_offsets))
    table, view = pipe.recv()
    sync.set_chunk_table(table)
    if discarded := sync.reconfigure(view, seat):
        raise RuntimeError(discarded.why)
    value, step = model.lane_sum(replica), 0

    def once() -> None:
        nonlocal step
        sums = sync.begin_step()
        sums.push_lane(seat, value)
        done = sync.commit(replica, step, sums)
        if not isinstance(done, Committed):
            raise RuntimeError(done.why)
        step += 1

    while True:
        pipe.send(timed(pipe.recv(), once))


if __name__ == "__main__":
    main()
