"""The driver's file service under a worker with a seat that does not keep to the protocol, and a worker's files under a
driver that does not. Another worker saves and loads meanwhile.

`make test` sends some hundred requests, `make test-all` 20,000.
"""

import contextlib
import json
import os
import socket
import struct
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint.driver_files import DriverConnections, DriverFiles
from shoal.checkpoint.store import CheckpointStore
from shoal.jobs.remote import file_service
from shoal.net.errors import LinkError
from shoal.net.file_transfer import receive_header
from tests.conftest import long_only
from tests.fuzz.grammar import damaged, mutated, raw_bytes
from tests.fuzz.test_files import examples
from tests.jobs.test_file_service import Driver

FEW, MANY = 30, 5000
PATIENCE_S = 20
HELLO = {"role": "files", "process": "worker", "seat": 1, "key": "KEY"}
OWN = ["foe", "foe/file", "foe/file/below", "foe/" + "x" * 255]
NASTY_PATHS = ["", ".", "..", "../canary", "a/../../canary", "/etc/passwd", "foe//file", "a\0b", "x" * 300, "a/" * 20,
               "job.yaml", "\u202e", "foe/\x1b[2J", ".lock", "model", "trace.jsonl"]  # fmt: skip
REQUESTS = [
    {"operation": operation, "area": area, "path": path}
    for operation, area in [
        ("read", "checkpoints"), ("write", "checkpoints"), ("remove", "checkpoints"), ("sizes", "checkpoints"),
        ("write", "model"), ("remove", "model"), ("append", "trace"), ("read", "code"), ("write", "code"),
    ]
    for path in OWN
] + [{"operation": "lock", "area": "checkpoints", "exclusive": alone} for alone in (True, False)]  # fmt: skip
REQUESTS.append({"operation": "unlock", "area": "checkpoints"})
ANSWERS = [{"size_bytes": 5}, {"size_bytes": 0}, {"number": 28, "message": "full"}, {"taken": False}, {}]


def frame(data):
    return struct.pack(">I", len(data)) + data


@st.composite
def requests(draw):
    """The bytes of a request with what follows it, most valid or nearly so."""
    request = draw(st.sampled_from(REQUESTS))
    how = draw(st.sampled_from(["valid", "valid", "path", "mutated", "damaged", "raw"]))
    if how == "path":
        request = request | {"path": draw(st.sampled_from(NASTY_PATHS))}
    if how == "mutated":
        request = draw(mutated(request))
    if how == "raw":
        return draw(raw_bytes)
    content = b"".join(frame(draw(st.binary(min_size=1, max_size=30))) for _ in range(draw(st.integers(0, 2))))
    ends = request.get("operation") in ("write", "append")
    data = frame(json.dumps(request).encode()) + (content + frame(b"") if ends else b"")
    return draw(damaged(data)) if how == "damaged" else data


@st.composite
def scripts(draw):
    """A greeting and requests of one connection."""
    hello = draw(mutated(HELLO, at_most=1)) if draw(st.integers(0, 5)) == 0 else HELLO
    return hello, [draw(requests()) for _ in range(draw(st.integers(1, 12)))]


class Foe:
    """Greets, says everything and reads on until the driver hangs up."""

    def __init__(self, driver):
        self.driver = driver
        self.key = driver.control.key("worker-1")

    def carry_out(self, hello, data):
        if hello.get("key") == "KEY":
            hello = hello | {"key": self.key}
        try:
            sock = self.driver.connect(**hello)
        except LinkError as failure:
            if "are allowed" not in str(failure):  # a greeting that is too long is not even sent
                raise
            return
        with contextlib.closing(sock):
            sock.settimeout(PATIENCE_S)
            with contextlib.suppress(OSError):
                sock.sendall(b"".join(data))
                sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                while sock.recv(1 << 16):  # a TimeoutError: it waits for ever
                    pass


class HonestWorker(threading.Thread):
    """Saves, sweeps, loads and compares until it is told to end."""

    def __init__(self, driver):
        super().__init__()
        self.connections = DriverConnections(driver.connect)
        self.files = DriverFiles(self.connections, "checkpoints")
        self.rounds, self.failure, self.ends = 0, None, threading.Event()

    def run(self):
        try:
            while not self.ends.is_set():
                self._save_and_load()
        except BaseException as failure:
            self.failure = failure
        finally:
            self.connections.close()

    def _save_and_load(self):
        store = CheckpointStore(self.files, job_sha256="a" * 64)
        state = {"w": torch.arange(20_000.0) + self.rounds}
        store.save(self.rounds + 1, state)
        store.wait()
        manifest, found = store.load_latest()
        assert manifest.step == self.rounds + 1
        assert torch.equal(found["w"], state["w"])
        store.close()
        self.rounds += 1


def outside(paths):
    """What a worker must not change."""
    above = paths.root.parent
    inside = (paths.checkpoints, paths.model, paths.trace)
    found = [path for path in above.rglob("*") if not any(path.is_relative_to(one) for one in inside)]
    return {str(path.relative_to(above)): path.read_bytes() for path in found if path.is_file()}


@pytest.fixture
def driver(tmp_path):
    (tmp_path / "run").mkdir()
    made = Driver(tmp_path / "run")
    made.files.admit(1)
    for name in ("job.yaml", "events.jsonl", "code/archive.tar"):
        (tmp_path / "run" / name).write_text(name)
    yield made
    made.close()


@pytest.mark.parametrize("count", [FEW, *long_only(MANY)])
def test_requests_for_files_cost_their_sender_only(driver, count, monkeypatch):
    failed, read, sent = [], [], []
    parse = file_service.parse_request
    monkeypatch.setattr(file_service, "parse_request", lambda data: read.append(data) or parse(data))
    monkeypatch.setattr(threading, "excepthook", failed.append)
    before, foe, honest = outside(driver.paths), Foe(driver), HonestWorker(driver)
    honest.start()

    @examples(count)
    @given(scripts())
    def attack(script):
        foe.carry_out(*script)
        sent.extend(script[1])
        assert not failed, f"{failed[0].exc_type.__name__}: {failed[0].exc_value}"

    try:
        attack()
    finally:
        honest.ends.set()
        honest.join()
    assert honest.failure is None, repr(honest.failure)
    assert honest.rounds > 0
    assert len(sent) > 4 * count
    assert len(read) > count
    assert driver.control.refused > count // 4
    assert outside(driver.paths) == before


def test_a_connection_holds_one_lock(driver):
    """Each costs a descriptor of the driver, and an exclusive one beside a shared one waits for itself."""
    lock = frame(b'{"operation":"lock","area":"checkpoints"}')
    unlock = frame(b'{"operation":"unlock","area":"checkpoints"}')
    foe, open_before = Foe(driver), len(os.listdir("/proc/self/fd"))
    with contextlib.closing(driver.connect(**HELLO | {"key": foe.key})) as sock:
        sock.settimeout(PATIENCE_S)
        for data in (lock, unlock, lock):
            sock.sendall(data)
            receive_header(sock)
        sock.sendall(lock * 100)
        with contextlib.suppress(ConnectionError):
            assert sock.recv(1 << 16) == b""
        assert len(os.listdir("/proc/self/fd")) < open_before + 50
    foe.carry_out(HELLO, [frame(b'{"operation":"lock","area":"checkpoints","exclusive":true}') + lock])


# ---- a driver that lies ----


@st.composite
def answers(draw):
    answer = draw(st.sampled_from(ANSWERS))
    how = draw(st.sampled_from(["valid", "mutated", "damaged", "raw"]))
    if how == "mutated":
        answer = draw(mutated(answer))
    content = draw(st.sampled_from([b"{}", b"12345", b'{"a":1}', b'{"a":-1}', b"[1,2]", b"[" * 5000, b"\xff" * 9]))
    if draw(st.booleans()):
        answer = answer | {"size_bytes": len(content)}
    data = frame(json.dumps(answer).encode()) + content
    return draw(raw_bytes) if how == "raw" else draw(damaged(data)) if how == "damaged" else data


OPERATIONS = {
    "open": lambda files: files.open("file").close(),
    "write": lambda files: files.write("file", [b"content"]),
    "append": lambda files: files.append("file", b"content"),
    "remove": lambda files: files.remove("file"),
    "sizes": lambda files: check_listing(files.sizes()),
    "save_lock": lambda files: hold(files.save_lock()),
    "sweep_lock": lambda files: hold(files.sweep_lock()),
}


def hold(lock):
    with lock:
        pass


def check_listing(found):
    assert all(isinstance(path, str) and size >= 0 for path, size in found.items())


@pytest.mark.parametrize("count", [FEW * 2, *long_only(MANY)])
def test_answers_of_a_driver_are_files_or_errors(count):
    outcomes = []

    @examples(count)
    @given(answers(), st.sampled_from(sorted(OPERATIONS)))
    def attack(data, name):
        near, far = socket.socketpair()
        far.sendall(data)
        far.shutdown(socket.SHUT_WR)
        connections = DriverConnections(lambda: near)
        try:
            OPERATIONS[name](DriverFiles(connections, "checkpoints"))
            outcomes.append("done")
        except (OSError, LinkError):
            outcomes.append("refused")
        finally:
            connections.close()
            near.close()
            far.close()

    attack()
    assert len(outcomes) >= count
    assert count // 10 < outcomes.count("done") < len(outcomes) - count // 10
