"""The local engine with real processes."""

import os
import signal

import psutil
import pytest

from shoal.fleet.engines.local import LocalEngine
from shoal.spec.view import Seat


@pytest.fixture
def entry(tmp_path, monkeypatch):
    """A module that a started seat runs: waits, exits with a code, or prints."""
    (tmp_path / "seat_entry.py").write_text(
        "import sys, time\nword = sys.argv[-1]\nprint('hello', sys.argv[2], flush=True)\n"
        "time.sleep(1000) if word == 'wait' else sys.exit(int(word))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "seat_entry"


def exits(engine, number):
    found = []
    while len(found) < number:
        found += engine.poll(10)
    return {e.seat: e.code for e in found}


def test_each_seat_is_reported_once_with_its_code(entry):
    with LocalEngine() as engine:
        engine.start([Seat(number=0)], entry, ["0"])
        engine.start([Seat(number=1)], entry, ["7"])
        assert exits(engine, 2) == {0: 0, 1: 7}
        assert engine.poll(0) == []


def test_a_killed_seat_is_reported_with_its_signal(entry):
    with LocalEngine() as engine:
        engine.start([Seat(number=3)], entry, ["wait"])
        os.kill(engine.pid(3), signal.SIGKILL)
        (gone,) = engine.poll(10)
        assert (gone.seat, gone.code, gone.reason) == (3, -9, "SIGKILL")


def test_stop_ends_the_seat_that_is_named(entry):
    with LocalEngine() as engine:
        engine.start([Seat(number=0), Seat(number=1)], entry, ["wait"])
        engine.stop([1])
        assert exits(engine, 1) == {1: -9}
        assert engine.poll(0) == []


def test_nothing_is_left_after_close(entry, tmp_path):
    engine = LocalEngine(logs={0: tmp_path / "logs" / "0.log"})
    engine.start([Seat(number=0)], entry, ["wait"])
    pid = engine.pid(0)
    engine.close()
    assert not psutil.pid_exists(pid)


def test_output_goes_to_the_log(entry, tmp_path):
    log = tmp_path / "logs" / "0.log"
    with LocalEngine(logs={0: log}) as engine:
        engine.start([Seat(number=0)], entry, ["0"])
        exits(engine, 1)
    assert log.read_text() == "hello 0\n"
