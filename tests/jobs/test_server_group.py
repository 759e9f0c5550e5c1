"""The servers of a run, with processes that stand in for servers and workers: killed, frozen, drained, adopted."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest

from shoal.errors import ShoalError
from shoal.events import read_events
from shoal.fleet.driver_address import read_driver_address
from shoal.fleet.forkserver import ForkServer
from shoal.fleet.orphans import find_orphans
from shoal.jobs import commands, run_executor, server_group
from shoal.jobs.remote import seat_launches
from shoal.net.listener import connect_host
from shoal.spec.load import make_job
from shoal.spec.run_paths import RunPaths
from tests.conftest import FIXTURES, MLP
from tests.jobs.background_run import background_run
from tests.jobs.fault_injection import assert_nothing_left

SERVING = MLP | {"sync": {"kind": "server", "servers": 3, "backups": 1}, "workers": 2}
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(FIXTURES), *sys.path])}
ALONE = SERVING | {"sync": {"kind": "server", "servers": 2, "backups": 0}}


@pytest.fixture(scope="module")
def fake_fork_server():
    with ForkServer(ENVIRONMENT, ["fake_server", "fake_worker"]) as made:
        yield made


@pytest.fixture
def begin(job_dir, fake_fork_server, monkeypatch):
    """Drives a job, or goes on with a run, in another thread; stops it at the end."""
    monkeypatch.setattr(seat_launches, "SERVER_MODULE", "fake_server")
    monkeypatch.setattr(server_group, "STATS_INTERVAL_S", 0.1)
    monkeypatch.setattr(seat_launches, "WORKER_MODULE", "fake_worker")

    @contextlib.contextmanager
    def go(job=SERVING, *, resumed=None, stops=True):
        def run(job, look):
            if resumed is not None:
                return run_executor.resume(resumed, on_event=look, fork_server=fake_fork_server)
            made = make_job(job, base_dir=str(job_dir), check_names=False)
            return run_executor.run(made, runs=job_dir / "runs", on_event=look, fork_server=fake_fork_server)

        with background_run(run, job) as it:
            try:
                yield it
            finally:
                if stops and it.paths is not None:
                    with contextlib.suppress(ShoalError):
                        commands.stop(it.paths)
        if stops:
            assert_nothing_left(it.outcome.result())

    return go


def fully_serving(number):
    """All of them hold what they should, and nobody else does."""
    return lambda run_state: (
        len(run_state.serving_servers) == number == run_state.wanted_servers and not servers_filling(run_state)
    )


def servers_filling(run_state):
    return [server for server in run_state.servers.values() if server.state in ("filling", "starting")]


def rows(it, kind):
    return [event for event in read_events(it.paths.events) if event.kind == kind]


def names(run_state):
    return [server.name for server in run_state.serving_servers]


def signal_server(it, name, number=signal.SIGKILL):
    os.kill(it.state.servers[name].pid, number)


def test_servers_are_started_and_tables_published(begin):
    with begin() as it:
        it.wait_until(fully_serving(3))
        it.wait_for_workers(2)
        run_state = it.state
        assert sum(server.primary_bytes for server in run_state.serving_servers) == 4100
        assert sum(server.backup_bytes for server in run_state.serving_servers) == 4100
        it.wait_until(lambda run_state: all(server.stats for server in run_state.serving_servers))
        assert run_state.staleness == (1.5, 4)
        (table,) = rows(it, "chunk_table")
        assert (table["number"], table["chunks"], table["moved_bytes"]) == (1, 5, 0)
        assert {(it.paths.logs / f"{name}.log").is_file() for name in names(run_state)} == {True}
    ended = it.outcome.result()
    assert ended.status == "stopped"
    assert not rows(it, "server_died")


def test_a_killed_server_is_missed_at_once_and_replaced(begin):
    with begin() as it:
        it.wait_until(fully_serving(3))
        victim = names(it.state)[1]
        signal_server(it, victim)
        it.wait_until(lambda run_state: run_state.server_deaths == 1 and fully_serving(3)(run_state))
        assert victim not in names(it.state)
        assert it.state.failovers == 1
        (died,) = rows(it, "server_died")
        assert died.fields == {"server": victim, "reason": "SIGKILL"}
        following = next(event for event in rows(it, "chunk_table") if event.t >= died.t)
        assert victim not in following["servers"]
        assert following.t - died.t < 1.0
        assert f"{victim} is gone" in following["why"]
        assert sum(event["moved_bytes"] for event in rows(it, "chunk_table")) >= 4100 * 2 // 3
        assert it.state.deaths == 0
        it.wait_for_workers(2)


@pytest.mark.long  # it waits for half a minute
def test_a_frozen_server_is_evicted_and_replaced(begin):
    with begin() as it:
        it.wait_until(fully_serving(3))
        victim = names(it.state)[0]
        signal_server(it, victim, signal.SIGSTOP)
        it.wait_until(lambda run_state: run_state.server_deaths == 1 and fully_serving(3)(run_state))
        (out,) = rows(it, "evicted")
        assert out["server"] == victim
        assert "frozen" in out["reason"]
        assert rows(it, "server_died")[0]["reason"] == out["reason"]


def test_a_drained_server_leaves_when_others_have_what_it_held(begin):
    with begin() as it:
        it.wait_until(fully_serving(3))
        with pytest.raises(ShoalError, match=r"SH613.*no server-99 now.*It has: worker-"):
            commands.drain(it.paths, "server-99")
        victim = names(it.state)[2]
        seat, answer = commands.drain(it.paths, victim)
        assert (seat.name, answer.servers_wanted) == (victim, 2)
        assert commands.wait_for_departure(it.paths, seat) == "left"
        it.wait_until(fully_serving(2))
        assert it.state.server_deaths == it.state.failovers == 0


def test_more_servers_and_fewer(begin):
    with begin() as it:
        it.wait_until(fully_serving(3))
        assert commands.scale(it.paths, servers=5).servers_wanted == 5
        it.wait_until(fully_serving(5))
        answer = commands.scale(it.paths, 1, servers=2)
        assert (answer.wanted, answer.servers_wanted) == (1, 2)
        it.wait_until(fully_serving(2))
        it.wait_for_workers(1)
        it.wait_until(lambda run_state: sum(s.state == "left" for s in run_state.servers.values()) == 3)
        assert it.state.server_deaths == 0
        assert it.state.peak_servers == 5


def test_when_all_copies_are_lost_the_run_goes_back(begin):
    with begin(ALONE) as it:
        it.wait_until(fully_serving(2))
        it.wait_for_workers(2)
        before = {worker.name for worker in it.state.training_workers}
        signal_server(it, names(it.state)[0])
        it.wait_until(lambda run_state: run_state.server_deaths == 1 and fully_serving(2)(run_state))
        it.wait_until(
            lambda p: len(p.training_workers) == 2 and not before & {worker.name for worker in p.training_workers}
        )
        (lost,) = rows(it, "servers_lost")
        assert "chunks were on servers that are gone" in lost["reason"]
        assert {event["worker"] for event in rows(it, "evicted")} == before
        assert {event["reason"] for event in rows(it, "worker_died")} == {lost["reason"]}
    assert it.outcome.result().status == "stopped"


@pytest.mark.parametrize(
    "hello",
    [
        {"role": "server"},
        {"role": "server", "seat": 99, "pid": 1, "host": "x", "address": {"host": "x", "port": 1}},
        {
            "role": "server",
            "seat": 0,
            "pid": 1,
            "host": "x",
            "address": {"host": "x", "port": 1},
            "table": {"number": 1},
        },
    ],
)
def test_who_is_no_server_of_ours_is_not_let_in(begin, hello):
    with begin() as it:
        it.wait_until(fully_serving(3))
        address = read_driver_address(it.paths.driver_address)
        with connect_host(address.host, address.port, address.token, json.dumps(hello).encode()) as sock:
            sock.settimeout(10)
            with sock.makefile("rb") as lines:
                assert b"welcome" not in lines.read()
        assert not rows(it, "server_died")


def test_loss_is_not_survived_more_often_than_the_job_allows(begin):
    with begin(ALONE | {"elastic": {"restarts": 1}}, stops=False) as it:
        it.wait_until(fully_serving(2))
        it.wait_for_workers(2)
        signal_server(it, names(it.state)[0])
        it.wait_until(
            lambda run_state: (
                run_state.server_deaths == 1 and fully_serving(2)(run_state) and len(run_state.training_workers) == 2
            )
        )
        signal_server(it, names(it.state)[0])
    outcome = it.outcome.result()
    assert outcome.status == "failed"
    assert outcome.error.code == "SH618"
    assert "no restarts left" in outcome.error.message
    assert_nothing_left(outcome)


def test_servers_that_die_at_once_are_not_started_for_ever(begin, job_dir):
    (job_dir / "runs").mkdir()
    (job_dir / "runs" / "broken").touch()
    with begin(stops=False) as it:
        pass
    outcome = it.outcome.result()
    assert outcome.status == "failed"
    assert "exit code 3 before it could serve; no restarts left" in outcome.error.message
    assert outcome.error.where.endswith(".err")
    assert len(rows(it, "server_died")) <= 6


def test_the_run_goes_on_with_fewer_when_none_can_be_started(begin, job_dir):
    with begin() as it:
        it.wait_until(fully_serving(3))
        (job_dir / "runs" / "broken").touch()
        signal_server(it, names(it.state)[0])
        it.wait_until(lambda run_state: run_state.wanted_servers == 2 and fully_serving(2)(run_state))
        assert "exit code 3 before it could serve" in rows(it, "servers_wanted")[-1]["why"]
        (job_dir / "runs" / "broken").unlink()
        commands.scale(it.paths, servers=3)
        it.wait_until(fully_serving(3))


DRIVER = """
import sys
from pathlib import Path
from shoal.fleet.forkserver import ForkServer
from shoal.jobs import run_executor, server_group
from shoal.jobs.remote import seat_launches
from shoal.spec.load import make_job
import json, os

seat_launches.SERVER_MODULE, seat_launches.WORKER_MODULE = "fake_server", "fake_worker"
job = make_job(json.loads(sys.argv[2]), base_dir=sys.argv[1], check_names=False)

def look(paths, event, run_state):
    if len(run_state.serving_servers) == 3 and len(run_state.training_workers) == 2:
        print(paths.root, flush=True)

if __name__ == "__main__":
    with ForkServer(os.environ, ["fake_server", "fake_worker"]) as fake_fork_server:
        run_executor.run(job, runs=Path(sys.argv[1]) / "runs", on_event=look, fork_server=fake_fork_server)
"""


@pytest.fixture
def orphaned_run(job_dir):
    """A run whose driver was killed. Returns its paths."""
    command = [sys.executable, "-c", DRIVER, str(job_dir), json.dumps(SERVING)]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as driver:
        root = driver.stdout.readline().strip()
        driver.kill()
        driver.stdout.read()
    return RunPaths.at(root)


def test_servers_outlive_their_driver_and_are_adopted(begin, orphaned_run):
    before = {one.seat.name: one.pid for one in find_orphans(orphaned_run)}
    assert sorted(name.partition("-")[0] for name in before) == ["server"] * 3 + ["worker"] * 2
    with begin(resumed=orphaned_run) as it:
        it.wait_until(lambda run_state: run_state.starts == 2 and fully_serving(3)(run_state))
        assert {server.name: server.pid for server in it.state.serving_servers}.items() <= before.items()
        tables = rows(it, "chunk_table")
        assert [event["number"] for event in tables] == sorted({event["number"] for event in tables})
        assert len(tables) >= 2
        it.wait_for_workers(2)
        assert not rows(it, "server_died")
        assert not rows(it, "servers_lost")


def test_a_server_that_died_without_a_driver_is_replaced(begin, orphaned_run):
    victim = next(one for one in find_orphans(orphaned_run) if one.seat.role == "server")
    os.kill(victim.pid, signal.SIGKILL)
    with begin(resumed=orphaned_run) as it:
        it.wait_until(lambda run_state: run_state.starts == 2 and fully_serving(3)(run_state))
        assert victim.seat.name not in names(it.state)
        assert not rows(it, "servers_lost")


def test_when_all_died_without_a_driver_the_workers_go_back(begin, orphaned_run):
    workers = {one.seat.name for one in find_orphans(orphaned_run) if one.seat.role == "worker"}
    for one in find_orphans(orphaned_run):
        if one.seat.role == "server":
            os.kill(one.pid, signal.SIGKILL)
    with begin(resumed=orphaned_run) as it:
        it.wait_until(lambda run_state: run_state.starts == 2 and fully_serving(3)(run_state))
        it.wait_until(
            lambda p: len(p.training_workers) == 2 and not workers & {worker.name for worker in p.training_workers}
        )
        assert len(rows(it, "servers_lost")) == 1
