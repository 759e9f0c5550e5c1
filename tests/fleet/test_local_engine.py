"""The local engine with real processes."""

import os
import signal
import subprocess
import threading

import psutil
import pytest

from shoal.fleet.engines.local import ForkServer, LocalEngine
from shoal.spec.view import Seat

ENTRY = """
import os, sys, time
def main():
    word = sys.argv[-1]
    print("hello", sys.argv[2], os.environ.get("COLOUR"), flush=True)
    if word == "wait":
        time.sleep(1000)
    if word == "crash":
        raise KeyError("oh")
    sys.exit(int(word))
"""


@pytest.fixture
def fork_server(tmp_path):
    (tmp_path / "seat_entry.py").write_text(ENTRY)
    with ForkServer(os.environ | {"PYTHONPATH": str(tmp_path)}, ["seat_entry"]) as made:
        yield made


@pytest.fixture
def engine(fork_server, tmp_path):
    return LocalEngine(fork_server, name="a", logs=tmp_path / "logs")


def exits(engine, number):
    found = []
    while len(found) < number:
        found += engine.poll(10)
    return {e.seat: e.code for e in found}


def test_each_seat_is_reported_once_with_its_code(engine):
    engine.start([Seat(number=0)], "seat_entry", ["0"])
    engine.start([Seat(number=1)], "seat_entry", ["7"])
    engine.start([Seat(number=2)], "seat_entry", ["crash"])
    assert exits(engine, 3) == {0: 0, 1: 7, 2: 1}
    assert engine.poll(0) == []


def test_a_fork_server_that_cannot_start_is_an_exit(tmp_path, capfd):
    with ForkServer(os.environ, ["no_such_module"]) as broken:
        engine = LocalEngine(broken, name="a", logs=tmp_path / "logs")
        engine.start([Seat(number=0)], "seat_entry", ["0"])
        assert exits(engine, 1) == {0: 1}
    assert "no_such_module" in capfd.readouterr().err


def test_files_in_the_users_directory_stand_in_for_no_module(tmp_path, monkeypatch):
    (tmp_path / "decimal.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    with ForkServer(os.environ, ["decimal"]) as fork_server:
        engine = LocalEngine(fork_server, name="a", logs=tmp_path / "logs")
        engine.start([Seat(number=0)], "decimal", [])
        assert exits(engine, 1) == {0: 1}, "it was forked, and found no main()"


def test_engines_in_threads_share_a_fork_server(fork_server, tmp_path):
    """What one hears may be meant for another, and none waits for what another has heard."""
    most, left = 12, {}

    def live(name):
        engine = LocalEngine(fork_server, name=name, logs=tmp_path / name)
        for number in range(most):
            engine.start([Seat(number=number)], "seat_entry", [str(number)])
            assert exits(engine, 1) == {number: number}
        engine.start([Seat(number=most)], "seat_entry", ["wait"])
        engine.close()
        left[name] = engine.seats

    threads = [threading.Thread(target=live, args=[name], daemon=True) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert left == {name: [] for name in "abcd"}


def test_a_killed_seat_is_reported_with_its_signal(engine):
    engine.start([Seat(number=3)], "seat_entry", ["wait"])
    os.kill(engine.pid(3), signal.SIGKILL)
    (gone,) = engine.poll(10)
    assert (gone.seat, gone.code, gone.reason) == (3, -9, "SIGKILL")


def test_a_server_has_its_own_log_and_the_entry_that_it_is_given(engine, tmp_path):
    engine.start([Seat(number=4, role="server")], "seat_entry", ["0"])
    assert exits(engine, 1) == {4: 0}
    assert (tmp_path / "logs" / "server-4.log").read_text() == "hello 4 None\n"


def test_stop_ends_the_seat_that_is_named(engine):
    engine.start([Seat(number=0), Seat(number=1)], "seat_entry", ["wait"])
    engine.stop([1])
    assert exits(engine, 1) == {1: -9}
    assert engine.poll(0) == []


def test_engines_that_share_a_fork_server_do_not_mix_up_their_seats(fork_server, tmp_path):
    one, two = (LocalEngine(fork_server, name=n, logs=tmp_path / n) for n in "ab")
    one.start([Seat(number=0)], "seat_entry", ["1"])
    two.start([Seat(number=0)], "seat_entry", ["2"])
    assert exits(two, 1) == {0: 2}
    assert exits(one, 1) == {0: 1}


def test_nothing_is_left_after_close(tmp_path):
    (tmp_path / "seat_entry.py").write_text(ENTRY)
    fork_server = ForkServer(os.environ | {"PYTHONPATH": str(tmp_path)}, ["seat_entry"])
    engine = LocalEngine(fork_server, name="a", logs=tmp_path / "logs")
    engine.start([Seat(number=0)], "seat_entry", ["wait"])
    pids = [engine.pid(0), fork_server._process.pid]
    fork_server.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_workers_outlive_a_killed_fork_server_and_are_watched_still(engine, fork_server):
    engine.start([Seat(number=0), Seat(number=1)], "seat_entry", ["wait"])
    workers = [psutil.Process(engine.pid(seat)) for seat in (0, 1)]
    os.kill(fork_server._process.pid, signal.SIGKILL)
    assert engine.poll(0.5) == []
    assert all(worker.is_running() for worker in workers)
    workers[0].kill()
    assert exits(engine, 1) == {0: -9}
    engine.stop([1])
    assert exits(engine, 1) == {1: -9}
    engine.start([Seat(number=2)], "seat_entry", ["7"])  # by another fork_server
    assert exits(engine, 1) == {2: 7}


def test_a_process_of_an_earlier_driver_is_adopted(engine, fork_server):
    with subprocess.Popen(["sleep", "1000"]) as left_behind:
        engine.adopt(5, left_behind.pid)
        assert engine.seats == [5]
        assert engine.poll(0) == []
        engine.stop([5])
        assert exits(engine, 1) == {5: -9}
    engine.adopt(6, left_behind.pid)  # it is gone already
    assert exits(engine, 1) == {6: -9}


def test_output_and_environment_are_the_seats_own(fork_server, tmp_path):
    engine = LocalEngine(fork_server, name="a", logs=tmp_path / "logs", environment={"COLOUR": "blue"})
    engine.start([Seat(number=0)], "seat_entry", ["0"])
    exits(engine, 1)
    assert (tmp_path / "logs" / "worker-0.log").read_text() == "hello 0 blue\n"
