"""Files through the driver: what the checkpoint store needs, within limits, and for nobody else."""

import json
import socket
import struct
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint.driver_files import DriverConnections, DriverFiles
from shoal.checkpoint.files import LocalFiles
from shoal.checkpoint.store import CheckpointStore
from shoal.errors import ShoalError
from shoal.fleet.control_server import ControlServer
from shoal.jobs.remote.code_archive import pack_code
from shoal.jobs.remote.file_service import MAX_CONNECTIONS_PER_SEAT, FileService
from shoal.net.file_transfer import MAX_HEADER_BYTES
from shoal.net.listener import connect_host
from shoal.spec.remote.file_requests import ALLOWED, FileAnswer, parse_request
from shoal.spec.run_paths import RunPaths
from shoal.train.fetch_code import fetch_code

TOKEN = "t" * 32


class Driver:
    """A control server with a door for files, as a driver has it."""

    def __init__(self, root):
        self.paths = RunPaths(root)
        self.control = ControlServer(TOKEN)
        (root / "code").mkdir()
        self.files = FileService(
            self.paths,
            checkpoints=str(self.paths.checkpoints),
            code=root / "code",
            holds_key=self.control.holds_key,
        )
        self.control.open_door("files", self.files.serve)
        self.files.admit(0)

    def connect(self, seat=0, **changes):
        hello = {"role": "files", "seat": seat, "key": self.control.key(f"worker-{seat}")} | changes
        return connect_host(self.control.host, self.control.port, TOKEN, json.dumps(hello).encode())

    def close(self):
        self.files.close()
        self.control.close()


@pytest.fixture
def driver(tmp_path):
    made = Driver(tmp_path)
    yield made
    made.close()


@pytest.fixture
def connections(driver):
    made = DriverConnections(driver.connect)
    yield made
    made.close()


@pytest.fixture
def files(connections):
    return DriverFiles(connections, "checkpoints")


def test_files_are_those_of_the_directory(driver, files):
    here = LocalFiles(str(driver.paths.checkpoints))
    content = [b"a" * 3_000_000, memoryview(b"end")]
    files.write("deep/down/file", content)
    with files.open("deep/down/file") as found, here.open("deep/down/file") as kept:
        assert found.read() == kept.read() == b"".join(content)
    assert files.sizes() == here.sizes() == {"deep/down/file": 3_000_003}
    assert files.sizes("deep") == here.sizes("deep")
    assert files.sizes("elsewhere") == {}
    files.remove("deep/down/file")
    files.remove("deep/down/file")
    assert files.sizes() == {}
    with pytest.raises(FileNotFoundError):
        files.open("deep/down/file")


def test_a_file_that_is_not_sent_to_its_end_does_not_exist(driver, files):
    def breaks():
        yield b"the beginning"
        raise RuntimeError("the worker is killed here")

    with pytest.raises(RuntimeError):
        files.write("blob", breaks())
    files.write("other", [b"x"])
    until_gone = threading.Event()
    for _ in range(500):
        if [file.name for file in driver.paths.checkpoints.iterdir()] == ["other"]:
            break
        until_gone.wait(0.01)
    assert [file.name for file in driver.paths.checkpoints.iterdir()] == ["other"]


def test_locks_hold_between_workers_and_end_with_their_connection(driver, files):
    driver.files.admit(1)
    others = DriverFiles(DriverConnections(lambda: driver.connect(1)), "checkpoints")
    with files.save_lock(), others.save_lock(), files.sweep_lock() as alone:
        assert not alone
    with others.sweep_lock() as alone:
        assert alone
        with files.sweep_lock() as second:
            assert not second
    with pytest.raises(OSError, match="cannot be asked"), others.sweep_lock():
        driver.files.dismiss(1)
    for _ in range(500):  # its thread lets the lock go
        with files.sweep_lock() as alone:
            if alone:
                break
        threading.Event().wait(0.01)
    assert alone


def test_a_store_saves_and_loads_through_it(driver, files):
    state = {"model": {"w": torch.arange(1000.0)}, "step": 3}
    store = CheckpointStore(files, job_sha256="a" * 64)
    store.save(3, state)
    store.wait()
    store.close()
    for there in (files, driver.paths.checkpoints):
        again = CheckpointStore(there, job_sha256="a" * 64)
        manifest, found = again.load_latest()
        assert manifest.step == 3
        assert torch.equal(found["model"]["w"], state["model"]["w"])
        again.close()


def test_code_is_fetched_once_by_a_machine_and_kept_by_its_content(driver, connections, tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "model.py").write_text("old")
    old = pack_code(base, driver.paths.root / "code")
    here, there = tmp_path / "here", tmp_path / "there"
    assert (fetch_code(connections, old, here) / "model.py").read_text() == "old"
    (driver.paths.root / "code" / f"{old.sha256}.tar").unlink()
    assert (fetch_code(connections, old, here) / "model.py").read_text() == "old", "it is there already"
    with pytest.raises(ShoalError, match="SH610"):
        fetch_code(connections, old, there)
    (base / "model.py").write_text("new")
    new = pack_code(base, driver.paths.root / "code")
    assert (fetch_code(connections, new, here) / "model.py").read_text() == "new"


def test_a_worker_that_was_declared_dead_cannot_write_any_more(driver, files):
    files.write("blob", [b"1"])
    driver.files.dismiss(0)
    with pytest.raises(OSError, match="cannot be asked"):
        files.write("blob", [b"2"])
    with pytest.raises(OSError, match="cannot be asked"):
        files.write("blob", [b"2"])
    assert (driver.paths.checkpoints / "blob").read_bytes() == b"1"


def test_an_error_of_the_disk_is_the_workers_error(driver, files):
    driver.paths.checkpoints.mkdir()
    (driver.paths.checkpoints / "file").touch()
    with pytest.raises(OSError, match=r"exists|directory"):
        files.write("file/below", [b"x" * 5_000_000])
    files.write("after", [b"x"])  # the conversation goes on


@pytest.mark.parametrize("hello", [{"key": "wrong"}, {"seat": 5}, {"seat": -1}, {"key": 7}, {"more": 1}])
def test_who_has_no_seat_is_refused(driver, hello):
    before = driver.control.refused
    with driver.connect(**({"key": driver.control.key("worker-0")} | hello)) as sock:
        sock.settimeout(10)
        assert sock.recv(1) == b""
    for _ in range(500):
        if driver.control.refused > before:
            return
        threading.Event().wait(0.01)
    pytest.fail("it was not refused")


def test_a_seat_has_few_connections(driver):
    open_ones = [driver.connect() for _ in range(MAX_CONNECTIONS_PER_SEAT)]
    for one in open_ones:  # each is served
        one.sendall(_frame(b'{"operation":"sizes","area":"checkpoints"}'))
        assert one.recv(4)
    more = driver.connect()
    more.settimeout(10)
    assert more.recv(1) == b""
    for one in (*open_ones, more):
        one.close()


def _frame(data):
    return struct.pack(">I", len(data)) + data


def ask(driver, data):
    """What the driver answers to these bytes; b'' if it closes the connection."""
    sock = driver.connect()
    sock.settimeout(10)
    try:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        return sock.recv(1 << 16)
    except OSError:  # it was faster
        return b""
    finally:
        sock.close()


BAD_PATHS = ["", "..", "a/../../b", "/etc/passwd", "a//b", "./a", "a/.", "a\0b", "x" * 300, "/".join("a" * 20)]


@pytest.mark.parametrize("path", BAD_PATHS)
@pytest.mark.parametrize("operation", ["read", "write", "remove"])
def test_paths_stay_inside(driver, path, operation):
    request = {"operation": operation, "area": "checkpoints", "path": path}
    assert ask(driver, _frame(json.dumps(request).encode()) + _frame(b"x") + _frame(b"")) == b""
    assert not driver.paths.checkpoints.exists()


@pytest.mark.parametrize("area", ALLOWED)
@pytest.mark.parametrize("operation", sorted(set.union(*map(set, ALLOWED.values()))))
def test_an_area_offers_what_it_is_for(area, operation):
    request = json.dumps({"operation": operation, "area": area, "path": "file"}).encode()
    if operation in ALLOWED[area]:
        assert parse_request(request).operation == operation
    else:
        with pytest.raises(ValueError, match="does not offer"):
            parse_request(request)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_garbage_is_no_request(data):
    with pytest.raises(ValueError, match=r"malformed|names no file|offer"):
        parse_request(data)


@pytest.mark.parametrize("data", [struct.pack(">I", MAX_HEADER_BYTES + 1), _frame(b"{}"), b"\xff" * 64, _frame(b"")])
def test_garbage_closes_the_connection_and_nothing_else(driver, files, data):
    assert ask(driver, data) == b""
    files.write("blob", [b"still served"])


def test_a_frame_that_is_too_large_is_refused_before_it_is_read(driver):
    request = _frame(b'{"operation":"write","area":"checkpoints","path":"f"}')
    assert ask(driver, request + struct.pack(">I", 1 << 31)) == b""
    assert list(driver.paths.checkpoints.iterdir()) == []


def test_the_trace_grows_and_the_model_is_written(driver, connections):
    trace, model = DriverFiles(connections, "trace"), DriverFiles(connections, "model")
    trace.append("trace.jsonl", b"1\n")
    trace.append("trace.jsonl", b"2\n")
    model.write("model.json", [b"{}"])
    assert driver.paths.trace.read_text() == "1\n2\n"
    assert (driver.paths.model / "model.json").read_text() == "{}"


@given(st.builds(FileAnswer, size_bytes=st.integers(0, 1 << 50), message=st.text(max_size=100)))
def test_answers_survive_the_wire(answer):
    assert FileAnswer.model_validate_json(answer.model_dump_json()) == answer
