"""One that knows the token and knows the protocols sends nonsense to the ports of servers and workers.

No process ends by it, and honest clients get on with the results that they have without it. A failed example is
repeated by its seed.
"""

import contextlib
import json
import os
import threading
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import shoal.server
from shoal.checkpoint import state_format
from shoal.collectives.group import ViewGroup
from shoal.collectives.peer_services import PeerServices
from shoal.paramserver.chunk_state import chunk_state_from_replica, group_hyperparameters, param_group_indices
from shoal.server.config import TRAINING_VIEW
from shoal.spec.view import View
from tests.fuzz.peer_messages import PURPOSES, STRANGER, Foe, ServerFrames
from tests.paramserver.cluster import TOKEN, Cluster
from tests.paramserver.test_bit_exact import assert_exact
from tests.paramserver.workloads import Workload
from tests.server.conftest import start  # noqa: F401

WORKLOAD = Workload()
how_many = pytest.mark.parametrize(
    ("examples", "messages"), [(1, 300), pytest.param(3, 15_000, marks=pytest.mark.long)], ids=["some", "many"]
)
"""Examples for each port, and messages in each."""


def run_attack(attack, *, examples, messages):
    """Call `attack(seed)`, which returns how many messages it has sent, for as many seeds."""
    sent = []

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate])
    @given(st.integers(0, (1 << 64) - 1))
    def example(seed):
        sent.append(attack(seed))

    example()
    assert sum(sent) >= examples * messages


@cache
def worker_words():
    """A replica of the workload's model, and how a worker describes it."""
    replica = WORKLOAD.replica()
    hyper = [{k: v for k, v in one.items() if k != "initial_lr"} for one in group_hyperparameters(replica.optimizer)]
    described = {"layout": replica.layout.describe(), "optimizer": "AdamW", "groups": param_group_indices(replica)}
    return replica, {**described, "hyper": hyper}


def attack_servers(foe, frames, addresses, *, honest, messages):
    """As a stranger with all that there is to say; in honest seats only with bytes that are no message."""
    while foe.sent < messages:
        address = foe.rng.choice(addresses)
        purpose = foe.rng.choice(["push"] * 4 + ["chain"] * 2 + PURPOSES)
        if foe.rng.random() < 0.03:
            impostor = {"purpose": purpose, "seat": foe.rng.choice(honest), "view": 1}
            foe.send(address, json.dumps(impostor).encode(), [foe.rng.randbytes(80)])
            continue
        hello = foe.greeting(purpose, seat=STRANGER + foe.rng.randint(0, 3), view=1, spoilt=0.15)
        fd = foe.descriptor() if foe.rng.random() < 0.1 else -1
        foe.send(address, hello, frames.some(), fd=fd, waits=foe.rng.random() < 0.1)
        if fd >= 0:
            os.close(fd)


# ---- servers of a job ----


@how_many
def test_servers_of_a_job(examples, messages):
    """While workers train: the bits are those of one worker without servers."""

    def attack(seed):
        replica, model = worker_words()
        foe, rounds = Foe(seed, TOKEN), 4

        def packed(piece):
            return state_format.pack_state(
                chunk_state_from_replica(replica, replica.layout, piece.first_chunk, piece.end_chunk, lanes=4)
            )

        with Cluster(WORKLOAD, workers=2, servers=2, backups=1, steps=rounds + 2) as cluster:
            cluster.begin()

            def pour():
                table = cluster.placement.chunk_table
                lanes = list(range(WORKLOAD.lanes))
                enter = {"carries": {str(STRANGER): lanes}, "model": model, "lead": True, "ready": True}
                frames = ServerFrames(foe, table, view=cluster.view.number, model=model, enter=enter, states=packed)
                goal = foe.sent + messages // rounds
                attack_servers(foe, frames, list(table.addresses.values()), honest=[0, 1, 100, 101], messages=goal)

            for step in range(1, rounds + 1):
                cluster.on_step[step] = [pour]
            assert_exact(cluster, cluster.finish())
            cluster.assert_backups_equal()
            assert cluster.deaths == 0
        return foe.sent

    run_attack(attack, examples=examples, messages=messages)


# ---- the door for other frameworks ----


@how_many
def test_servers_for_other_frameworks(examples, messages, start):  # noqa: F811
    """While two clients push: each push counts once."""

    def attack(seed):
        with start(workers=2, servers=2, backups=1) as servers:
            foe, table, done = Foe(seed, servers.token), servers._supervisor.chunk_table, threading.Event()
            config = servers._config
            frames = ServerFrames(
                foe,
                table,
                view=TRAINING_VIEW,
                model=config.model,
                enter={**config.enter_fields(TRAINING_VIEW), "lead": True, "ready": True},
                states=lambda piece: state_format.pack_state({"parameters": torch.zeros(piece.stop - piece.start)}),
            )
            found = {}
            clients = [threading.Thread(target=count_until, args=(servers, i, done, found)) for i in range(2)]
            for client in clients:
                client.start()
            try:
                attack_servers(foe, frames, list(table.addresses.values()), honest=[0, 1, 2, 3], messages=messages)
            finally:
                done.set()
                for client in clients:
                    client.join()
            assert found[0] == found[1] > 0
            assert {float(x) for value in servers.pull().values() for x in np.unique(value)} == {float(found[0])}
            assert len(servers.processes) == 2
        return foe.sent

    run_attack(attack, examples=examples, messages=messages)


def count_until(servers, worker, done, found):
    """Push -1 until done, but as often as the other worker."""
    with shoal.server.connect(servers.address, worker=worker, token=servers.token, timeout_s=60) as client:
        values = client.pull()
        minus = {name: np.full_like(value, -1) for name, value in values.items()}
        while True:
            found[worker] = client.step
            if done.is_set() and found.get("last", client.step + 1) <= client.step:
                return
            if done.is_set():
                found.setdefault("last", client.step + 1)
            client.push(minus)


# ---- a worker's port ----


@how_many
def test_workers(examples, messages):
    """While two workers meet in view after view, and one fetches state and residuals from the other."""

    def attack(seed):
        foe = Foe(seed, TOKEN)
        workers = [PeerServices(TOKEN, bind="127.0.0.1") for _ in range(2)]
        groups = [ViewGroup(one.endpoint, TOKEN) for one in workers]
        with contextlib.ExitStack() as stack:
            for one in (*workers,):
                stack.callback(one.close)
            for group in groups:
                stack.callback(group.leave)
            view = 0
            while foe.sent < messages:
                view += 1
                addresses = {seat: one.endpoint.address for seat, one in enumerate(workers)}
                agreed = View(number=view, carries={0: [0], 1: [1]}, addresses=addresses, source=0)
                attacker = threading.Thread(target=attack_worker, args=(foe, addresses[view % 2], view))
                attacker.start()
                try:
                    meet(workers, groups, agreed)
                finally:
                    attacker.join()
            assert sum(one.endpoint.refused for one in workers) > 0
        return foe.sent

    run_attack(attack, examples=examples, messages=messages)


def attack_worker(foe, address, view):
    for _ in range(20):
        purpose = foe.rng.choice(PURPOSES)
        hello = foe.greeting(purpose, seat=STRANGER, view=foe.rng.choice([0, view - 1, view, view + 1, 1 << 31]))
        foe.send(address, hello, [foe.rng.randbytes(foe.rng.choice([0, 1, 9, 64, 300])) for _ in range(3)])


def meet(workers, groups, view):
    """Both enter the view and gather; then worker 1 fetches what worker 0 has."""
    found = {}

    def take_part(seat):
        assert groups[seat].enter(view, seat) is None
        found[seat] = groups[seat].gather(view.number, bytes([seat]))

    members = [threading.Thread(target=take_part, args=(seat,)) for seat in range(2)]
    for member in members:
        member.start()
    for member in members:
        member.join()
    assert found[0] == found[1] == {0: b"\0", 1: b"\1"}
    state = {"weights": torch.arange(5.0) + view.number}
    workers[0].state_server.open(view.number, lambda: state)
    fetched = workers[1].fetch_state(view, 1, max_bytes=1 << 20)
    workers[0].state_server.close()
    assert torch.equal(fetched["weights"], state["weights"])
    assert workers[1].fetch_residuals(view, 1, source=0, step=0, lanes=[0], floats=4) == {}
