"""The engine with agents: real agents and processes on this machine that share nothing but the test's files."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import replace

import psutil
import pytest

from shoal.errors import error
from shoal.fleet.agents.agent_pipe import BANNER, SetupCommand
from shoal.fleet.agents.host_agent import SCRATCH_PREFIX, remove_stale_directories, scratch_directory
from shoal.fleet.engine import Launch, Node
from shoal.fleet.engines.agents import AgentEngine
from shoal.fleet.engines.host_link import AgentHost
from shoal.fleet.engines.host_use import GRACE_S, HostUse
from shoal.fleet.engines.make import apart_hosts, explain_agent
from shoal.fleet.forkserver import ForkServer
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import Seat
from tests.conftest import living
from tests.fleet.engine_contract import PATIENCE_S, EngineContract, collect_exits, launch, wait_exits, wait_ready
from tests.fleet.test_local_engine import EARLY_ENTRY
from tests.jobs.fault_injection import time_limit

ENTRY = """
import os, sys, time
from pathlib import Path
def main():
    seat, word = int(sys.argv[2]), sys.argv[3]
    print("hello", seat, Path(sys.argv[-1]).name, os.environ.get("SHOAL_MACHINE"), flush=True)
    print("a warning", file=sys.stderr)
    if word == "wait":
        here = Path(__file__).parent
        (here / f"pid-{seat}").write_text(str(os.getpid()))
        (here / f"ready-{seat}").touch()
        time.sleep(1000)
    if word == "crash":
        raise KeyError("oh")
    sys.exit(int(word))
"""


@pytest.fixture
def fork_server(tmp_path):
    """Only its settings are used."""
    (tmp_path / "seat_entry.py").write_text(ENTRY)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with ForkServer(os.environ | {"PYTHONPATH": path}, ["seat_entry"], at_once=False) as made:
        yield made


@pytest.fixture
def engine(fork_server, tmp_path):
    made = AgentEngine(apart_hosts(2, fork_server), RunPaths(tmp_path))
    yield made
    made.close()


class TestAgentEngine(EngineContract):
    outlives_driver = False

    @pytest.fixture
    def make_engine(self, fork_server, tmp_path):
        return lambda: AgentEngine(apart_hosts(1, fork_server), RunPaths(tmp_path))


def pids(tmp_path, *seats):
    return [int((tmp_path / f"pid-{seat}").read_text()) for seat in seats]


def wait_gone(*processes):
    psutil.wait_procs(living(processes), timeout=PATIENCE_S)
    assert not [pid for pid in processes if psutil.pid_exists(pid)]


def test_seats_are_spread_over_the_hosts_and_their_output_comes_back(engine, tmp_path):
    engine.start([launch(0, "0"), launch(1, "7")])
    assert collect_exits(engine, 2) == {0: 0, 1: 7}
    logs = [(tmp_path / "logs" / f"worker-{seat}.log").read_text() for seat in (0, 1)]
    assert sorted(log.split()[3] for log in logs) == ["machine-0", "machine-1"]
    assert [log.split()[2] for log in logs] == ["worker-0", "worker-1"]
    assert (tmp_path / "logs" / "worker-1.err").read_text() == "a warning\n"


def test_two_runs_use_both_hosts_if_they_know_of_each_other(fork_server, tmp_path):
    """Each run alone would begin on the first host, and the second host would have nothing to do."""
    use = HostUse()
    runs = [RunPaths(tmp_path / name) for name in ("a", "b")]
    with contextlib.ExitStack() as stack:
        made = [AgentEngine(apart_hosts(2, fork_server), paths, host_use=use) for paths in runs]
        for seat, engine in enumerate(made):
            stack.callback(engine.close)
            engine.start([launch(seat, "wait")])
            while not runs[seat].log(seat, "worker").exists():
                assert not engine.poll(1.0)
        logs = [paths.log(seat, "worker").read_text() for seat, paths in enumerate(runs)]
        assert sorted(log.split()[3] for log in logs) == ["machine-0", "machine-1"]
        made[0].stop([0])
        collect_exits(made[0], 1)
        made[0].start([launch(7, "0")])
        collect_exits(made[0], 1)
        assert runs[0].log(7, "worker").read_text().split()[3] == logs[0].split()[3], "the place is free again"
    assert [use.processes(f"machine-{n}") for n in (0, 1)] == [0, 0], "closed engines have given their places back"


def test_the_loss_of_an_agent_ends_its_seats_and_no_others(engine, tmp_path):
    engine.start([launch(0, "wait"), launch(1, "wait")])
    wait_ready(tmp_path, 0, 1, engine=engine)
    doomed = engine.agent_pids()["machine-0"]
    os.kill(doomed, signal.SIGKILL)
    (one,) = wait_exits(engine, 1)
    assert one.code is None
    assert one.reason == "the loss of host machine-0"
    wait_gone(*pids(tmp_path, one.seat))
    assert engine.running() == [1 - one.seat]
    engine.start([launch(5, "0")])  # its host comes back
    assert collect_exits(engine, 1) == {5: 0}
    engine.stop([1 - one.seat])
    assert collect_exits(engine, 1) == {1 - one.seat: -9}


DRIVER = """
    import os, sys, time
    from pathlib import Path
    from shoal.fleet.engines.agents import AgentEngine
    from shoal.fleet.engines.make import apart_hosts
    from shoal.fleet.forkserver import ForkServer
    from shoal.spec.run_paths import RunPaths
    from tests.fleet.engine_contract import launch
    root = Path(sys.argv[1])
    engine = AgentEngine(apart_hosts(1, ForkServer(os.environ, ["seat_entry"], at_once=False)), RunPaths(root))
    engine.start([launch(0, "wait"), launch(1, "wait")])
    while True:
        engine.poll(1)
"""


def test_nothing_outlives_a_driver_that_is_killed(fork_server, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-c", textwrap.dedent(DRIVER), str(tmp_path)]
    with subprocess.Popen(command, env=fork_server.environment | {"TMPDIR": str(scratch)}) as driver:
        wait_ready(tmp_path, 0, 1)
        assert list(scratch.glob(f"{SCRATCH_PREFIX}*"))
        others = [process.pid for process in psutil.Process(driver.pid).children(recursive=True)]
        driver.kill()
    wait_gone(*others, *pids(tmp_path, 0, 1))
    assert list(scratch.glob(f"{SCRATCH_PREFIX}*")) == []


def test_a_fork_server_that_is_killed_takes_its_processes_along(engine, tmp_path):
    """A host has one: it has imported torch for all."""
    engine.start([launch(seat, "wait", node="machine-1") for seat in (0, 1)])
    wait_ready(tmp_path, 0, 1, engine=engine)
    (parent,) = {psutil.Process(pid).parent() for pid in pids(tmp_path, 0, 1)}
    parent.kill()
    assert {one.seat for one in wait_exits(engine, 2)} == {0, 1}
    wait_gone(*pids(tmp_path, 0, 1))
    engine.start([launch(2, "7", node="machine-1")])
    assert collect_exits(engine, 1) == {2: 7}


def test_a_host_that_is_taken_away_gets_no_more_seats(engine, tmp_path):
    engine.start([launch(0, "wait"), launch(1, "wait")])
    wait_ready(tmp_path, 0, 1, engine=engine)
    os.kill(engine.agent_pids()["machine-0"], signal.SIGTERM)
    (one,) = wait_exits(engine, 1)
    assert one.code == -signal.SIGTERM  # it does not know the signal; a worker leaves
    until = time.monotonic() + PATIENCE_S
    while len(engine.capacity()) == 2 and time.monotonic() < until:
        engine.poll(0.1)
    assert [node.name for node in engine.capacity()] == ["machine-1"]
    engine.start([launch(2, "0")])
    assert collect_exits(engine, 1) == {2: 0}
    assert "machine-1" in (tmp_path / "logs" / "worker-2.log").read_text()


@pytest.mark.parametrize("turn", range(3))
def test_a_process_that_is_started_as_its_host_is_taken_away_leaves_too(engine, tmp_path, turn):
    """Whichever of the two arrives first."""
    (tmp_path / "early_entry.py").write_text(EARLY_ENTRY)
    engine.start([launch(0, "wait", node="machine-0"), launch(1, "0", node="machine-1")])
    assert collect_exits(engine, 1) == {1: 0}
    engine.start([Launch(Seat(number=2), "early_entry", node="machine-1")])
    os.kill(engine.agent_pids()["machine-1"], signal.SIGTERM)
    assert collect_exits(engine, 1) == {2: 5}
    assert engine.running() == [0]


@pytest.fixture(autouse=True)
def limited_time():
    with time_limit(150):
        yield


def fake_host(name, script):
    node = Node(name, cores=1, memory_bytes=0, gpus=0, shares_run_dir=False)
    return AgentHost(node, ("sh", "-c", script), SetupCommand(environment={}, modules=[]), explain_agent)


def banner_and(line):
    banner = '{"kind":"shoal-agent","protocol":1}'
    return f"echo Welcome to this machine; echo '{banner}'; echo '{line}'; cat >/dev/null"


def ready(torch):
    return banner_and(f'{{"kind":"ready","platform":{{"torch":"{torch}"}}}}')


@pytest.mark.parametrize(
    ("scripts", "told"),
    [
        ([ready("2.13.0"), ready("2.12.1")], "SH654.*differ: torch (2.13.0 and 2.12.1|2.12.1 and 2.13.0)"),
        ([banner_and('{"kind":"ready","platform":{"shoal":"0.0.1"}}')], r"SH654.*Shoal \S+ drives, and h0 has 0.0.1"),
        ([ready("2.13.0"), "echo no such thing >&2; exit 3"], "SH629.*exit code 3: no such thing"),
        (["echo garbage; exit 0"], "SH629"),
        (["""echo '{"kind":"shoal-agent","protocol":99}'; sleep 100"""], "version"),
        ([banner_and('{"kind":"ready","platform":7}')], "malformed"),
        ([banner_and("x" * 100)], "malformed"),
        (["head -c 3000000 /dev/zero; sleep 100"], "too long"),
        (["yes noise; sleep 100"], "version"),
    ],
)
def test_a_host_that_cannot_be_used_is_an_error_before_anything_starts(tmp_path, scripts, told):
    engine = AgentEngine([fake_host(f"h{n}", script) for n, script in enumerate(scripts)], RunPaths(tmp_path))
    try:
        engine.start([launch(0, "wait"), launch(1, "wait")])
        found = wait_exits(engine, 2)
    finally:
        engine.close()
    assert [one.code for one in found] == [1, 1]
    for one in found:
        assert re.search(told, str(one.start_error)), str(one.start_error)


@pytest.mark.parametrize(
    ("script", "limit", "told"),
    [
        ("echo welcome; exec sleep 1000", "BANNER_TIMEOUT_S", "h1 accepted the connection and said nothing for 0.05 s"),
        (f"echo '{BANNER.decode()}'; exec sleep 1000", "READY_TIMEOUT_S", "the agent on h1 is not ready after 0.05 s"),
    ],
)
def test_a_host_that_hangs_when_it_is_connected_to_is_an_error_that_names_it(
    tmp_path, monkeypatch, script, limit, told
):
    """sshd answers, and a login script or a file system hangs. Everything else waits for every host."""
    monkeypatch.setattr(f"shoal.fleet.engines.host_link.{limit}", 0.05)
    engine = AgentEngine([fake_host("h1", script)], RunPaths(tmp_path))
    try:
        engine.start([launch(0, "wait")])
        pids = list(engine.agent_pids().values())
        (one,) = wait_exits(engine, 1)
        assert (one.start_error.code, one.start_error.where) == ("SH651", "host h1")
        assert one.start_error.message.startswith(told), one.start_error
        assert not living(pids)
    finally:
        engine.close()


@pytest.fixture
def make_fakes(tmp_path):
    """Makes engines of runs of one process, on two fake hosts. `down`: while it exists, h1 cannot be reached."""
    now, down = [0.0], tmp_path / "down"
    use = HostUse(lambda: now[0])

    def explain(code, errors):
        return error("SH651", f"h1 cannot be reached: {errors.strip()}")

    with contextlib.ExitStack() as stack:

        def make(name):
            reached = f"if test -e {down}; then echo refused >&2; exit 255; fi; {ready('1')}"
            hosts = [fake_host("h0", ready("1")), replace(fake_host("h1", reached), explain=explain)]
            made = AgentEngine(hosts, RunPaths(tmp_path / name), host_use=use)
            stack.callback(made.close)
            return made

        make.use, make.down, make.now = use, down, now
        yield make


def host_of(engine, seat):
    while engine._seats[seat].link is None:
        assert engine.poll(0.05) == []
    return engine._seats[seat].link.host.name


def lose_host(make_fakes, engine):
    make_fakes.down.touch()
    os.kill(engine.agent_pids()["h1"], signal.SIGKILL)
    while not make_fakes.use.is_lost("h1"):
        engine.poll(0.05)


def test_a_run_does_not_wait_for_a_host_that_a_run_beside_it_has_lost(make_fakes):
    first, second = make_fakes("a"), make_fakes("b")
    first.start([launch(0, "wait")])
    assert host_of(first, 0) == "h0"
    lose_host(make_fakes, first)
    second.start([launch(0, "wait")])
    make_fakes.now[0] += GRACE_S
    assert host_of(second, 0) == "h0", "which is full, but there is no other"
    while "h1" in second._links:  # its attempt has not failed yet
        second.poll(0.05)
    make_fakes.down.unlink()
    second._retries["h1"].at_s = 0.0
    second.start([launch(1, "wait")])
    while make_fakes.use.is_lost("h1"):
        second.poll(0.05)
    second.start([launch(2, "wait")])
    assert host_of(second, 2) == "h1", "it is used again when it comes back"


def test_a_host_that_was_never_reached_is_an_error_once_and_then_nobody_waits_for_it(make_fakes):
    make_fakes.down.touch()
    first, second = make_fakes("a"), make_fakes("b")
    first.start([launch(0, "wait")])
    (one,) = wait_exits(first, 1)
    assert (one.start_error.code, one.start_error.message) == ("SH651", "h1 cannot be reached: refused")
    second.start([launch(0, "wait")])
    assert host_of(second, 0) == "h0"


def test_if_all_hosts_are_lost_a_seat_gives_up_after_a_while(make_fakes, monkeypatch):
    monkeypatch.setattr("shoal.fleet.engines.agents.NO_HOST_S", 0.2)
    for host in ("h0", "h1"):
        make_fakes.use.lose(host)
    monkeypatch.setattr(AgentEngine, "_connect", lambda engine: None)
    engine = make_fakes("a")
    engine.start([launch(0, "wait")])
    (one,) = wait_exits(engine, 1)
    assert (one.start_error.code, one.start_error.message) == ("SH651", "no host could be reached for 0.2 s")


def test_reports_of_foreign_seats_have_no_effect(tmp_path):
    exited = '{"kind":"exited","seat":7,"code":0,"reason":"x"}'
    said = '{"kind":"ready","platform":{}}\n' + exited + '\n{"kind":"output","seat":8,"text":"x"}'
    engine = AgentEngine([fake_host("h", banner_and(said))], RunPaths(tmp_path))
    try:
        engine.start([launch(0, "wait")])
        assert engine.poll(0.3) == []
        assert engine.running() == [0]
        assert list((tmp_path / "logs").iterdir()) == []
    finally:
        engine.close()


def test_a_kill_that_the_host_does_not_confirm_counts_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.fleet.engines.agents.KILL_CONFIRM_S", 0.05)
    engine = AgentEngine([fake_host("h", banner_and('{"kind":"ready","platform":{}}'))], RunPaths(tmp_path))
    try:
        engine.start([launch(0, "wait")])
        while engine._seats[0].link is None:
            engine.poll(0.1)
        engine.stop([0])
        (one,) = wait_exits(engine, 1)
        assert (one.code, one.reason) == (None, "SIGKILL, which its host did not confirm")
    finally:
        engine.close()


def test_directories_of_killed_agents_are_removed_and_those_of_living_ones_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = tmp_path / f"{SCRATCH_PREFIX}dead"
    dead.mkdir()
    (dead / ".lock").touch()
    with scratch_directory() as living:
        remove_stale_directories()
        assert living.exists()
        assert not dead.exists()
    assert not living.exists()
