"""The port of a queue, from callers that have tokens: no message ends it, nor changes the jobs and machines of others.

`make test` sends some hundred messages, `make test-all` two thousand.
"""

import contextlib
import copy
import json
import socket
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.errors import ShoalError
from shoal.jobs.queue import client
from shoal.jobs.queue.access_tokens import TokenFile, name_of_key
from shoal.jobs.queue.network import frames, server
from shoal.jobs.queue.network.messages import LeavingMessage, LookRequest, OfferHello, PingMessage, encode
from shoal.jobs.queue.network.remote_queue import QueueAddress, RemoteQueue
from shoal.jobs.queue.network.server import QueueServer
from shoal.jobs.queue.queue_file import QueuePaths
from shoal.jobs.queue.queue_store import QueueStore
from shoal.jobs.remote.code_archive import pack_code
from shoal.net.errors import LinkError
from shoal.net.file_transfer import send_content
from shoal.plan.queueing.elastic_shares import ElasticShares
from shoal.plan.queueing.shares import JobFacts
from shoal.spec.load import make_job
from tests.conftest import MLP, long_only
from tests.fuzz.grammar import damaged, mutated, raw_bytes

FEW, MANY = 150, 2000
ROLES = ("read", "operate", "submit", "machine")
ANSWER_S = 20.0


class Served:
    """A queue with a job and a machine of others, its port, and one token of each role for the foe."""

    def __init__(self, root, base_dir):
        self.paths = QueuePaths.of(root / "runs")
        self.paths.runs.mkdir(parents=True)
        self.server = QueueServer(self.paths, server.bind("127.0.0.1:0", tls=False), tls_contexts=None)
        tokens = TokenFile(self.paths.runs)
        made = {role: tokens.create(f"foe-{role}", role=role, runs=[], expires_t=None) for role in ROLES}
        made |= {name: tokens.create(name, role=role, runs=[], expires_t=None) for name, role in
                 (("ann", "submit"), ("box", "machine"))}  # fmt: skip
        self.addresses = {name: QueueAddress.of(self.server.address, token, None) for name, token in made.items()}
        self.job = make_job(copy.deepcopy(MLP), base_dir=str(base_dir))
        self.code = pack_code(base_dir, root)
        RemoteQueue(self.addresses["ann"]).submit(self.job)  # its directory is there from now on
        hello = OfferHello(
            key=name_of_key(self.addresses["box"].key), instance="0" * 32, machine="box", cores=2, memory_bytes=1 << 30
        )
        self.machine = self.addresses["box"].connect(encode(hello))
        while not self.server.pool.capacity().nodes:
            self.ping()

    def ping(self):
        """A machine that says nothing for long is lost."""
        self.machine.sendall(encode(PingMessage()) + b"\n")

    def requests(self, role):
        """Valid ones, of every kind."""
        code = self.code.model_dump()
        return [
            {"kind": "look"},
            {"kind": "history", "number": 1},
            {"kind": "change", "number": 1, "what": "cancel"} if role != "operate" else {"kind": "look"},
            {"kind": "submit", "job": self.job.dump(), "priority": 1, "after": [1], "code": code},
            {"kind": "submit", "job": self.job.dump(), "work": {"kind": "compress", "of": 1}, "code": code},
            {"kind": "compress", "of": 1, "sets": ["steps=3"]},
        ]

    def send(self, role, hello, content):
        """Greet, send, and read until the other side closes. Returns whether it was let in."""
        self.ping()
        try:
            sock = self.addresses[role].connect(hello)
        except ShoalError:
            return False
        with contextlib.closing(sock):
            sock.settimeout(ANSWER_S)
            with contextlib.suppress(LinkError, OSError):
                content(sock)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 16):
                    pass
        return True

    def check(self):
        """All is as before, and whoever serves the queue can read and divide what was submitted."""
        self.ping()
        view = RemoteQueue(self.addresses["ann"]).look()
        assert (view.entries[1].user, view.entries[1].state, view.entries[1].priority) == ("ann", "waiting", 0)
        assert {entry.user for entry in view.entries.values()} <= {"ann", "foe-submit"}
        assert {entry.kind for entry in view.entries.values()} <= {"training", "search", "verify"}
        cluster = self.server.pool.capacity()
        assert cluster.nodes["box"] == 2
        with QueueStore(self.paths) as store:
            for entry in view.entries.values():
                store.job(entry.id), store.work(entry.id)
        facts = {number: JobFacts() for number in view.entries}
        ElasticShares().divide(0.0, [], list(view.entries.values()), cluster=cluster, facts=facts)


@pytest.fixture
def served(tmp_path):
    base = tmp_path / "job"
    base.mkdir()
    (base / "models.py").write_text("def mlp(inputs, classes): ...\n")
    made = Served(tmp_path, base)
    yield made
    made.machine.close()
    made.server.close()


@st.composite
def attacks(draw, served):
    """A role, the greeting, and what follows it."""
    role = draw(st.sampled_from(ROLES))
    key = name_of_key(served.addresses[role].key)
    hello = {"kind": "user", "key": key}
    if role == "machine":
        name = draw(st.sampled_from(["box", "other"]))
        hello = {"kind": "offer", "key": key, "instance": "1" * 32, "machine": name, "cores": 1, "memory_bytes": 1}
    if draw(st.integers(0, 3)) == 0:
        hello = draw(mutated(hello, at_most=1)) | {"key": key}
    if role == "machine":
        words = [encode(PingMessage()), encode(LeavingMessage()), encode(LookRequest())]
        line = draw(st.one_of(*map(damaged, words), raw_bytes, st.just(b"x" * 5000)))
        return role, hello, lambda sock: sock.sendall(line + b"\n")
    request = draw(st.sampled_from(served.requests(role)))
    data = json.dumps(draw(mutated(request))).encode("utf-8", "replace")
    match draw(st.sampled_from(["mutated", "valid", "damaged", "raw", "frames"])):
        case "valid":
            data = json.dumps(request).encode()
        case "damaged":
            data = draw(damaged(data))
        case "raw":
            data = draw(raw_bytes)
        case "frames":
            return role, hello, lambda sock: sock.sendall(data)
    code = draw(raw_bytes)

    def content(sock):
        send_content(sock, [data])
        with contextlib.suppress(LinkError):
            frames.receive(sock, server.REQUEST)  # whatever comes back; an archive may be wanted
        send_content(sock, [code])

    return role, hello, content


@pytest.mark.parametrize("count", [FEW, *long_only(MANY)])
def test_messages_to_a_queue_cost_their_senders_only(served, count, monkeypatch):
    failed, let_in = [], [0]
    monkeypatch.setattr(threading, "excepthook", failed.append)

    @settings(
        max_examples=count, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(data=st.data())
    def attack(data):
        role, hello, content = data.draw(attacks(served))
        let_in[0] += served.send(role, json.dumps(hello).encode("utf-8", "replace"), content)
        assert not failed, f"{failed[0].exc_type.__name__}: {failed[0].exc_value}"

    attack()
    served.check()
    assert let_in[0] > count / 2
    assert len(client.look(served.paths.runs).entries) > 1, "no job of the foe was taken"
