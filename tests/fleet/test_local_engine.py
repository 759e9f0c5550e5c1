"""The local engine with real processes."""

import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from shoal.fleet.engine import Launch
from shoal.fleet.engines.local import LocalEngine
from shoal.fleet.forkserver import ForkServer
from shoal.fleet.orphans import find_orphans
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import Seat
from tests.fleet.engine_contract import EngineContract, collect_exits, launch, wait_exits, wait_ready

EARLY_ENTRY = """
import os, time
def on_early_sigterm(*_):
    os._exit(5)
def main():
    time.sleep(1000)
"""
ENTRY = """
import os, signal, sys
from pathlib import Path
from shoal.fleet.process_main import hold_seat_lock
from shoal.spec.run_paths import RunPaths
def main():
    seat, word = int(sys.argv[2]), sys.argv[-1]
    print("hello", seat, os.environ.get("COLOUR"), flush=True)
    if word == "wait":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        here = Path(__file__).parent
        role = "server" if (here / "logs" / f"server-{seat}.log").exists() else "worker"
        with hold_seat_lock(RunPaths(here), seat, role=role):
            (here / f"ready-{seat}").touch()
            signal.sigtimedwait({signal.SIGUSR1}, 1000)
        return
    if word == "crash":
        raise KeyError("oh")
    sys.exit(int(word))
"""


@pytest.fixture
def environment(tmp_path):
    (tmp_path / "seat_entry.py").write_text(ENTRY)
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture
def fork_server(environment):
    with ForkServer(environment, ["seat_entry"]) as made:
        yield made


@pytest.fixture
def engine(fork_server, tmp_path):
    return LocalEngine(fork_server, RunPaths(tmp_path))


class TestLocalEngine(EngineContract):
    @pytest.fixture
    def make_engine(self, environment, tmp_path):
        """Each driver has a fork server of its own, and what it forked outlives it."""
        fork_servers = []

        def make():
            fork_servers.append(ForkServer(environment, ["seat_entry"]))
            return LocalEngine(fork_servers[-1], RunPaths(tmp_path))

        yield make
        for fork_server in fork_servers:
            fork_server.close()

    def test_one_that_was_taken_over_and_leaves_did_not_die(self, make_engine, tmp_path):
        first, second = make_engine(), make_engine()
        first.start([launch(0, "wait"), launch(1, "wait")])
        wait_ready(tmp_path, 0, 1, engine=first)
        second.reattach()
        for orphan in find_orphans(RunPaths(tmp_path)):
            os.kill(orphan.pid, signal.SIGKILL if orphan.seat.number else signal.SIGUSR1)
        codes = {one.seat: one.code for one in wait_exits(second, 2)}
        assert codes[0] == 0
        assert codes[1] != 0


def test_an_entry_that_cannot_be_imported_is_told_with_its_line_and_its_log(environment, tmp_path):
    (tmp_path / "broken_entry.py").write_text("import os\nimport no_such_package\n")
    with ForkServer(environment, ["broken_entry", "seat_entry"]) as fork_server:
        engine = LocalEngine(fork_server, RunPaths(tmp_path))
        engine.start([Launch(Seat(number=0), "broken_entry"), launch(1, "0")])
        exits = {one.seat: one for one in wait_exits(engine, 2)}
    told = exits[0].start_error
    assert (told.code, told.where) == ("SH629", f"{tmp_path / 'broken_entry.py'}:2")
    assert "no_such_package" in told.message
    assert told.fix == f"Install the package no_such_package for {sys.executable}."
    assert "import no_such_package" in (tmp_path / "logs" / "worker-0.err").read_text()
    assert (exits[1].code, exits[1].start_error) == (0, None), "the others are started"


def test_modules_may_be_named_while_the_first_ones_are_imported(environment, tmp_path):
    """A module that counts how often it is executed: once by the fork server, and once more by the next one."""
    (tmp_path / "later.py").write_text(f"open({str(tmp_path / 'imports')!r}, 'a').write('x')\n")
    (tmp_path / "later_entry.py").write_text("import sys\nfrom later import __name__ as _\ndef main(): sys.exit(5)\n")
    (tmp_path / "broken_entry.py").write_text("import no_such_package\n")
    with ForkServer(environment, ["seat_entry"]) as fork_server:
        fork_server.preload(["later", "later_entry", "broken_entry"])
        engine = LocalEngine(fork_server, RunPaths(tmp_path))
        engine.start([Launch(Seat(number=seat), "later_entry") for seat in (0, 1)])
        assert collect_exits(engine, 2) == {0: 5, 1: 5}
        assert (tmp_path / "imports").read_text() == "x"
        engine.start([Launch(Seat(number=2), "broken_entry")])
        assert wait_exits(engine, 1)[0].start_error.code == "SH629"
        os.kill(fork_server._process.pid, signal.SIGKILL)
        fork_server._process.wait()
        engine.poll(0.5)
        engine.start([Launch(Seat(number=3), "later_entry")])
        assert collect_exits(engine, 1) == {3: 5}
        assert (tmp_path / "imports").read_text() == "xx"


def test_a_fork_server_that_still_imports_is_closed_at_once(environment, tmp_path):
    os.mkfifo(tmp_path / "never_written")
    (tmp_path / "endless.py").write_text(f"open({str(tmp_path / 'never_written')!r})\n")
    fork_server = ForkServer(environment, ["seat_entry"])
    fork_server.preload(["endless"])
    while not fork_server.platform:  # the first modules are imported
        fork_server.poll(1.0)
    fork_server.close()
    assert not psutil.pid_exists(fork_server._process.pid)


DRIVER = """
import os, signal, sys
from pathlib import Path
from shoal.fleet.forkserver import ForkServer
here = Path(sys.argv[1])
server = ForkServer(dict(os.environ), ["seat_entry", "slow"])
server.start("late", "seat_entry", ["--seat", "0", "0"], logs=here / "late", environment=dict(os.environ))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_forked_for_a_driver_that_was_killed(environment, tmp_path):
    """The next driver would not find a process that is born after it has looked."""
    importing, go_on = tmp_path / "importing", tmp_path / "go-on"
    os.mkfifo(importing)
    os.mkfifo(go_on)
    (tmp_path / "slow.py").write_text(
        f"import os\nopen({str(importing)!r}, 'w').write(str(os.getpid()))\nopen({str(go_on)!r}).read()\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], env=environment)
    fork_server = psutil.Process(int(importing.read_text()))
    assert driver.wait() == -signal.SIGKILL
    go_on.write_text("")
    fork_server.wait(30)
    assert not (tmp_path / "late.log").exists()


def test_an_interpreter_without_shoal_is_told(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    with ForkServer(os.environ, [], python=str(python)) as broken:
        engine = LocalEngine(broken, RunPaths(tmp_path))
        engine.start([launch(0, "0")])
        (gone,) = wait_exits(engine, 1)
    assert gone.start_error.code == "SH629"
    assert f"{python} ended with exit code 3" in gone.start_error.message


def test_a_process_that_cannot_be_forked_is_told(environment, tmp_path):
    limited = "import os, resource\nresource.setrlimit(resource.RLIMIT_NPROC, (0, 0))\n"
    nobody = "if os.geteuid() == 0: os.setuid(65534)\n"  # no limit holds for root
    limited = "import email.parser\n" + limited  # of the versions of packages: nobody may not read all of Python
    (tmp_path / "limited_entry.py").write_text(limited + nobody)
    with ForkServer(environment, ["seat_entry", "limited_entry"]) as fork_server:
        engine = LocalEngine(fork_server, RunPaths(tmp_path))
        engine.start([launch(0, "0")])
        (gone,) = wait_exits(engine, 1)
    assert gone.start_error.code == "SH628"
    assert "ulimit -u" in gone.start_error.fix


def test_files_in_the_users_directory_stand_in_for_no_module(tmp_path, monkeypatch):
    (tmp_path / "decimal.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    with ForkServer(os.environ, ["decimal"]) as fork_server:
        engine = LocalEngine(fork_server, RunPaths(tmp_path))
        engine.start([Launch(Seat(number=0), "decimal")])
        assert collect_exits(engine, 1) == {0: 1}, "it was forked, and found no main()"


def test_engines_in_threads_share_a_fork_server(fork_server, tmp_path):
    """What one reads may be meant for another, and none waits for what another has read."""
    most, left = 12, {}

    def live(name):
        engine = LocalEngine(fork_server, RunPaths(tmp_path / name))
        for number in range(most):
            engine.start([launch(number, str(number))])
            assert collect_exits(engine, 1) == {number: number}
        engine.start([launch(most, "wait")])
        engine.close()
        left[name] = engine.running()

    threads = [threading.Thread(target=live, args=[name], daemon=True) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert left == {name: [] for name in "abcd"}


def test_a_killed_seat_is_reported_with_its_signal(engine):
    engine.start([launch(3, "wait")])
    os.kill(engine.pid(3), signal.SIGKILL)
    (gone,) = wait_exits(engine, 1)
    assert (gone.seat, gone.code, gone.reason) == (3, -9, "SIGKILL")


def test_terminate_sends_the_signal_that_asks_to_leave(engine, tmp_path):
    engine.start([launch(3, "wait")])
    wait_ready(tmp_path, 3)
    engine.terminate([3])
    (gone,) = wait_exits(engine, 1)
    assert (gone.seat, gone.code, gone.reason) == (3, -15, "SIGTERM")


def test_a_server_has_its_own_log_and_the_entry_that_it_is_given(engine, tmp_path):
    engine.start([launch(4, "0", role="server")])
    assert collect_exits(engine, 1) == {4: 0}
    assert (tmp_path / "logs" / "server-4.log").read_text() == "hello 4 None\n"


def test_engines_that_share_a_fork_server_do_not_mix_up_their_seats(fork_server, tmp_path):
    one, two = (LocalEngine(fork_server, RunPaths(tmp_path / name)) for name in "ab")
    one.start([launch(0, "1")])
    two.start([launch(0, "2")])
    assert collect_exits(two, 1) == {0: 2}
    assert collect_exits(one, 1) == {0: 1}


def test_nothing_is_left_when_the_fork_server_is_closed(environment, tmp_path):
    fork_server = ForkServer(environment, ["seat_entry"])
    engine = LocalEngine(fork_server, RunPaths(tmp_path))
    engine.start([launch(0, "wait")])
    pids = [engine.pid(0), fork_server._process.pid]
    fork_server.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_workers_outlive_a_killed_fork_server_and_are_watched_still(engine, fork_server):
    engine.start([launch(0, "wait"), launch(1, "wait")])
    workers = [psutil.Process(engine.pid(seat)) for seat in (0, 1)]
    os.kill(fork_server._process.pid, signal.SIGKILL)
    assert engine.poll(0.5) == []
    assert all(worker.is_running() for worker in workers)
    workers[0].kill()
    assert collect_exits(engine, 1) == {0: None}, "only a parent learns the exit code"
    engine.stop([1])
    assert collect_exits(engine, 1) == {1: None}
    engine.start([launch(2, "7")])  # by another fork server
    assert collect_exits(engine, 1) == {2: 7}


def test_a_process_that_ended_before_it_was_adopted_is_an_exit(fork_server):
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    fork_server.adopt("key", ended.pid)
    fork_server.poll(1)
    assert fork_server.pop_exit_codes(["key"]) == {"key": None}


def test_output_and_environment_are_the_seats_own(fork_server, environment, tmp_path):
    engine = LocalEngine(fork_server, RunPaths(tmp_path), environment=environment | {"COLOUR": "blue"})
    engine.start([launch(0, "0")])
    collect_exits(engine, 1)
    assert (tmp_path / "logs" / "worker-0.log").read_text() == "hello 0 blue\n"


def test_a_signal_to_a_process_that_was_just_forked_is_neither_lost_nor_fatal(environment, tmp_path):
    (tmp_path / "early_entry.py").write_text(EARLY_ENTRY)
    with ForkServer(environment, ["early_entry"]) as fork_server:
        engine = LocalEngine(fork_server, RunPaths(tmp_path))
        for seat in range(20):
            engine.start([Launch(Seat(number=seat), "early_entry")])
            engine.terminate([seat])
        assert collect_exits(engine, 20) == dict.fromkeys(range(20), 5)
