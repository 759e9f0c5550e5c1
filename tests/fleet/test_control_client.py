"""The worker's end: it finds its driver, and finds it again."""

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from shoal.errors import ShoalError
from shoal.fleet import connection_thread, control_client
from shoal.fleet.control_client import ControlClient
from shoal.fleet.driver_address import DriverAddress, read_driver_address, write_driver_address
from shoal.net import handshake
from shoal.net.handshake import new_token
from shoal.spec.chunk_table import ChunkTable
from shoal.spec.view import View
from tests.fleet.fake_driver import TIMEOUT_S, fake_driver

TOKEN = new_token()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(connection_thread, "PING_INTERVAL_S", 0.05)
    monkeypatch.setattr(control_client, "HEARTBEAT_INTERVAL_S", 0.02)
    monkeypatch.setattr(control_client, "MIN_BACKOFF_S", 0.01)
    monkeypatch.setattr(control_client, "MAX_BACKOFF_S", 0.05)


@pytest.fixture
def driver_address(tmp_path):
    return tmp_path / "contact.json"


@pytest.fixture
def client_of(driver_address):
    """A client that looks into the driver_address file."""
    with contextlib.ExitStack() as stack:

        def make(beat=dict, **callbacks):
            made = ControlClient(
                lambda: read_driver_address(driver_address), lambda: {"seat": 0}, heartbeat=beat, **callbacks
            )
            return stack.enter_context(contextlib.closing(made))

        yield make


def eventually(condition):
    """For what no event is told of."""
    never = threading.Event()
    for _ in range(TIMEOUT_S * 100):
        if condition():
            return
        never.wait(0.01)
    pytest.fail("it did not happen")


@contextlib.contextmanager
def in_thread(act):
    """What it returned stands in the list after the block."""
    result = []
    thread = threading.Thread(target=lambda: result.append(act()))
    thread.start()
    yield result
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def test_it_waits_for_a_driver_and_is_welcomed(driver_address, client_of):
    client = client_of()
    with in_thread(lambda: client.connect(TIMEOUT_S)) as welcome, fake_driver(TOKEN) as boss:
        write_driver_address(driver_address, boss.contact)
        (here,) = boss.wait_for("here")
        assert here.fields == {"seat": 0}
        boss.wait_for("beat", 3)
    assert welcome == [{"caller": here.connection}]
    assert client.local_address == "127.0.0.1"


@pytest.mark.parametrize("case", ["no contact", "nobody there", "wrong token", "no such host", "not welcome"])
def test_who_cannot_be_reached_is_an_error_that_says_why(driver_address, client_of, case):
    with fake_driver(TOKEN, welcomes=False) as boss, socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        contacts = {
            "no contact": (None, "not written yet"),
            "nobody there": (DriverAddress("127.0.0.1", unused.getsockname()[1], TOKEN), "refused"),
            "wrong token": (DriverAddress(boss.contact.host, boss.contact.port, new_token()), "token"),
            "no such host": (DriverAddress("no-such-host.invalid", 1, TOKEN), "cannot find"),
            "not welcome": (boss.contact, "does not answer"),
        }
        given, why = contacts[case]
        if given is not None:
            write_driver_address(driver_address, given)
        client = client_of()
        with pytest.raises(ShoalError, match=why) as failure:
            client.connect(0.3)
        client.close()
    assert failure.value.code == "SH610"
    assert TOKEN not in f"{failure.value}{failure.value!r}{client!r}"
    assert given is None or given.token not in f"{failure.value}"


def test_it_follows_the_driver_to_another_port_and_stands_there_again(driver_address, client_of):
    welcomes = []
    client = client_of(on_welcome=welcomes.append)
    with contextlib.ExitStack() as first:
        one = first.enter_context(fake_driver(TOKEN))
        write_driver_address(driver_address, one.contact)
        client.connect(TIMEOUT_S)
        with in_thread(lambda: client.wait(0, after=3, position=14)) as found, fake_driver(TOKEN) as two:
            (standing,) = one.wait_for("standing")
            assert standing.fields == {"view": 3, "position": 14, "saved": False}
            first.close()
            client.send("event", line="said while alone")
            write_driver_address(driver_address, two.contact)
            assert two.wait_for("here")[0].fields == {"seat": 0}
            assert two.wait_for("standing")[0].fields == {"view": 3, "position": 14, "saved": False}
            assert two.wait_for("event")[0].fields == {"line": "said while alone"}
            two.publish(View(number=4, carries={0: [0]}))
            eventually(lambda: client.newer(3))
            assert client.driver_silence_s == 0.0
    assert found[0].number == 4
    assert len(welcomes) == 2
    assert client.view.number == 4


def test_a_standing_is_told_to_a_driver_that_comes_later_and_not_after_the_wait(driver_address, client_of):
    client = client_of()
    with pytest.raises(ShoalError):
        client.connect(0)
    assert client.wait(0, after=1, position=2, timeout_s=0) is None
    with in_thread(lambda: client.wait(0, after=1, position=4)) as found, fake_driver(TOKEN) as boss:
        write_driver_address(driver_address, boss.contact)
        (standing,) = boss.wait_for("standing")
        assert standing.fields == {"view": 1, "position": 4, "saved": False}
        boss.publish(View(number=2, stop="enough"))
        eventually(lambda: client.newer(1))
        boss.control.drop(standing.connection)
        boss.wait_for("here", 2)
        boss.wait_for("beat", 3)
        assert len([said for said in boss.received if said.kind == "standing"]) == 1
    assert found[0].stop == "enough"


FROZEN_DRIVER = """
import pathlib, select, sys
from shoal.fleet import connection_thread
connection_thread.PING_INTERVAL_S = 0.05
from shoal.fleet.driver_address import DriverAddress, write_driver_address
from shoal.fleet.control_server import ControlServer

control = ControlServer(sys.argv[2])
write_driver_address(pathlib.Path(sys.argv[1]), DriverAddress(control.host, control.port, sys.argv[2]))
while True:
    select.select([control], [], [])
    for said in control.receive():
        if said.kind == "here":
            control.send(said.connection, "welcome", here=said.connection)
        elif said.kind == "ask":
            control.send(said.connection, "view", view={"number": said.fields["number"], "stop": "x"})
"""


def test_a_frozen_driver_is_missed_and_found_again(driver_address, client_of, monkeypatch):
    monkeypatch.setattr(control_client, "DRIVER_HEARD_WITHIN_S", 0.3)
    monkeypatch.setattr(control_client, "DRIVER_TIMEOUT_S", 0.6)
    monkeypatch.setattr(handshake, "TIMEOUT_S", 0.3)
    boss = subprocess.Popen([sys.executable, "-c", FROZEN_DRIVER, str(driver_address), TOKEN])
    try:
        welcomes = []
        client = client_of(on_welcome=welcomes.append)
        client.connect(TIMEOUT_S)
        assert client.driver_silence_s == 0.0
        os.kill(boss.pid, signal.SIGSTOP)
        eventually(lambda: client.driver_silence_s > 1.0)  # beyond the time after which it calls anew
        client.send("ask", number=1)
        os.kill(boss.pid, signal.SIGCONT)
        eventually(lambda: len(welcomes) > 1 and client.driver_silence_s == 0.0)
        assert client.wait(0, after=0, position=0, timeout_s=TIMEOUT_S).number == 1
    finally:
        boss.kill()
        boss.wait()
    eventually(lambda: client.driver_silence_s > 0.1)


FROZEN_WORKER = """
import pathlib, sys
from shoal.fleet.driver_address import read_driver_address
from shoal.fleet.control_client import ControlClient

path = pathlib.Path(sys.argv[1])
client = ControlClient(lambda: read_driver_address(path), lambda: {"seat": 9}, heartbeat=lambda: {"n": 1})
client.connect(30)
print(client.wait(9, after=0, position=6).stop, client.driver_silence_s)
client.close()
"""


def test_a_worker_that_was_frozen_comes_back_by_itself(driver_address):
    with fake_driver(TOKEN) as boss:
        write_driver_address(driver_address, boss.contact)
        worker = subprocess.Popen(
            [sys.executable, "-c", FROZEN_WORKER, str(driver_address)], stdout=subprocess.PIPE, text=True
        )
        try:
            (first,) = boss.wait_for("standing")
            os.kill(worker.pid, signal.SIGSTOP)
            eventually(lambda: boss.control.silence_s(first.connection) > 0.5)
            boss.control.drop(first.connection)
            os.kill(worker.pid, signal.SIGCONT)
            _, again = boss.wait_for("standing", 2)
            assert again.connection != first.connection
            assert again.fields == first.fields
            boss.publish(View(number=1, stop="home"))
            assert worker.communicate(timeout=TIMEOUT_S)[0] == "home 0.0\n"
            assert [said.connection for said in boss.wait_for("lost")] == [again.connection]
        finally:
            worker.kill()
            worker.wait()


def test_it_beats_while_the_main_thread_computes(driver_address, client_of):
    with fake_driver(TOKEN) as boss:
        write_driver_address(driver_address, boss.contact)
        client_of().connect(TIMEOUT_S)
        before = len(boss.wait_for("beat"))
        for _ in range(100):
            hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000)
            if len([said for said in boss.received if said.kind == "beat"]) >= before + 5:
                break
        else:
            pytest.fail("no beat came through")


def test_a_beat_that_is_asked_for_is_sent_at_once(driver_address, client_of, monkeypatch):
    monkeypatch.setattr(control_client, "HEARTBEAT_INTERVAL_S", 10 * TIMEOUT_S)
    with fake_driver(TOKEN) as boss:
        write_driver_address(driver_address, boss.contact)
        client = client_of()
        client.connect(TIMEOUT_S)
        for asked in (1, 2):
            client.beat()
            boss.wait_for("beat", asked)


def test_what_callbacks_raise_ends_nothing_and_is_printed_once(driver_address, capfd):
    def fail(*_):
        raise KeyError("oh dear")

    calls = iter([ValueError("not yet"), None])

    def hello():
        if (problem := next(calls, None)) is not None:
            raise problem
        return {"seat": 0}

    with fake_driver(TOKEN) as boss:
        client = ControlClient(lambda: boss.contact, hello, heartbeat=fail, on_view=fail, on_welcome=fail)
        with contextlib.closing(client):
            client.connect(TIMEOUT_S)
            assert all(said.fields == {} for said in boss.wait_for("beat", 3))
            boss.publish(View(number=1, stop="x"))
            assert client.wait(0, after=0, position=0, timeout_s=TIMEOUT_S).number == 1
            boss.wait_for("beat", 6)
    errors = capfd.readouterr().err
    assert errors.count("KeyError: 'oh dear'") == 1
    assert errors.count("ValueError: not yet") == 1
    assert TOKEN not in errors


def test_a_beat_tells_what_it_is_given_and_views_are_called_out(driver_address, client_of):
    views, steps = [], iter(range(1000_000))
    with fake_driver(TOKEN) as boss:
        write_driver_address(driver_address, boss.contact)
        client = client_of(beat=lambda: {"step": next(steps)}, on_view=views.append)
        client.connect(TIMEOUT_S)
        assert [said.fields["step"] for said in boss.wait_for("beat", 4)] == [0, 1, 2, 3]
        for number in (2, 1, 2, 3):
            boss.publish(View(number=number, carries={0: [0]}))
        eventually(lambda: client.newer(2))
        eventually(lambda: len(views) == 2)
    assert [view.number for view in views] == [2, 3]


def table(number):
    return ChunkTable(
        number=number, cuts=[0, 512, 600], chains=[[3], [3]], filling=[[], [4]],
        addresses={seat: {"host": "127.0.0.1", "port": seat} for seat in (3, 4)},
    )  # fmt: skip


def test_the_newest_table_is_kept_and_waited_for(driver_address, client_of):
    tables = []
    with fake_driver(TOKEN) as boss:
        write_driver_address(driver_address, boss.contact)
        client = client_of(on_chunk_table=tables.append)
        client.connect(TIMEOUT_S)
        boss.wait_for("here")
        assert client.chunk_table is None
        assert client.wait_chunk_table(0, 0.01) is None
        with in_thread(lambda: client.wait_chunk_table(4, TIMEOUT_S)) as found:
            for number in (3, 2, 3, 5):
                boss.control.publish_chunk_table(table(number), boss.callers)
        assert found == [table(5)]
        assert client.chunk_table == table(5)
        assert client.wait_chunk_table(4, 0) == table(5)
        assert client.wait_chunk_table(5, 0) is None
        eventually(lambda: len(tables) == 2)
    assert [one.number for one in tables] == [3, 5]


def test_a_table_that_is_none_costs_the_driver_its_caller(driver_address, client_of):
    with fake_driver(TOKEN) as boss:
        write_driver_address(driver_address, boss.contact)
        client = client_of()
        client.connect(TIMEOUT_S)
        (here,) = boss.wait_for("here")
        boss.control.send(here.connection, "table", table={"number": 1, "cuts": [0, 5], "chains": []})
        boss.wait_for("here", 2)
        boss.control.publish_chunk_table(table(1), boss.callers[1:])
        assert client.wait_chunk_table(0, TIMEOUT_S).number == 1


def test_close_ends_a_wait_for_a_table(client_of):
    client = client_of()
    with in_thread(lambda: client.wait_chunk_table(0)) as found:
        client.close()
    assert found == [None]


def test_a_driver_that_talks_nonsense_is_left(driver_address, client_of):
    with fake_driver(TOKEN) as boss:
        write_driver_address(driver_address, boss.contact)
        client = client_of()
        client.connect(TIMEOUT_S)
        (here,) = boss.wait_for("here")
        boss.control.send(here.connection, "view", view={"number": -1})
        boss.wait_for("here", 2)
        boss.control.send(boss.callers[1], "unheard of", text="is passed over")
        boss.publish(View(number=1, stop="x"))
        assert client.wait(0, after=0, position=0, timeout_s=TIMEOUT_S).number == 1
        assert len(boss.callers) == 2


def test_what_is_said_without_a_driver_waits_and_the_oldest_goes_first(driver_address, client_of, monkeypatch):
    monkeypatch.setattr(control_client, "MAX_UNSENT_BYTES", 50_000)
    client = client_of()
    for number in range(100):
        client.send("event", number=number, text="a" * 1000)
    assert 50 <= client.dropped_messages <= 60
    with fake_driver(TOKEN) as boss:
        write_driver_address(driver_address, boss.contact)
        client.connect(TIMEOUT_S)
        kept = [said.fields["number"] for said in boss.wait_for("event", 100 - client.dropped_messages)]
    assert kept == list(range(client.dropped_messages, 100))


def test_a_row_that_is_too_long_is_the_speakers_fault(client_of):
    with pytest.raises(ValueError, match="'event'"):
        client_of().send("event", text="a" * 2_000_000)


def test_the_last_words_arrive(driver_address, client_of):
    with fake_driver(TOKEN) as boss:
        write_driver_address(driver_address, boss.contact)
        client = client_of()
        client.connect(TIMEOUT_S)
        for number in range(200):
            client.send("event", number=number, text="a" * 10_000)
        client.close()
        boss.wait_for("lost")
        assert [said.fields["number"] for said in boss.wait_for("event", 200)] == list(range(200))


def test_close_ends_a_wait_and_is_harmless_without_connect(client_of):
    client = client_of()
    with in_thread(lambda: client.wait(0, after=0, position=0)) as found:
        eventually(lambda: client._stop_report is not None)
        client.close()
    assert found == [None]
    client.close()
    client.send("nobody hears this")


def test_a_hundred_drivers_leave_nothing_open(driver_address, client_of):
    def open_files():
        return len(os.listdir("/proc/self/fd"))

    with fake_driver(TOKEN) as boss:
        write_driver_address(driver_address, boss.contact)
        client = client_of()
        client.connect(TIMEOUT_S)
        boss.wait_for("beat")
        before, threads = open_files(), threading.active_count()
        for number in range(2, 102):
            boss.control.drop(boss.callers[-1])
            boss.wait_for("here", number)
        boss.wait_for("beat", len([said for said in boss.received if said.kind == "beat"]) + 1)
        eventually(lambda: open_files() <= before and threading.active_count() <= threads)
        assert json.dumps(client.connect(TIMEOUT_S))
