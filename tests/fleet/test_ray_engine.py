"""The engine over several real nodes of Ray on this machine. Run by `make test-ray`."""

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import psutil
import pytest

from shoal.fleet.engines.make import ray_engine
from shoal.fleet.forkserver import ForkServer
from shoal.net.wakeup import Wakeup
from shoal.spec.engine import RayEngineConfig
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import Seat
from tests.fleet import engine_contract
from tests.fleet.engine_contract import AgentContract, agent_above, collect_exits, launch, wait_exits, wait_ready
from tests.fleet.ray_nodes import ENVIRONMENT, ray_nodes
from tests.fleet.test_agent_engine import ENTRY, pids, wait_gone

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no ray: make test-ray"),
]
PATIENCE_S = 300


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with ray_nodes(2, tmp_path_factory.mktemp("ray") / "log") as made:
        yield made


@pytest.fixture
def make(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_contract, "PATIENCE_S", PATIENCE_S)  # an actor takes seconds
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "seat_entry.py").write_text(ENTRY)
    python = tmp_path / "python"  # the environment of an actor is its node's, not the driver's
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}:$PYTHONPATH exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    made = []
    with ForkServer(os.environ | {"OMP_NUM_THREADS": "1"}, ["seat_entry"], at_once=False) as fork_server:

        def make(*, gang_size=1, **fields):
            config = RayEngineConfig(kind="ray", **({"address": cluster.address, "python": str(python)} | fields))
            made.append(ray_engine(config, RunPaths(tmp_path), fork_server, patience_s=600, gang_size=gang_size))
            return made[-1]

        yield make
        for engine in made:
            engine.close()
    wait_for(lambda: not cluster.groups(), "placement groups are left")


def wait_for(condition, what):
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.1)


class TestRayEngine(AgentContract):
    @pytest.fixture
    def make_engine(self, make):
        return make


def test_a_gang_waits_until_there_is_room_for_all(cluster, make):
    """Each of the two nodes has room for one of the three."""
    engine = make(gang_size=3, resources={"CPU": 2})
    engine.start([launch(seat, "wait") for seat in range(3)])
    asked = ["PENDING_CREATION"] * 3
    wait_for(lambda: engine.poll(0.1) == [] and waiting_agents(cluster) == asked, "three were not asked for")
    ((state, nodes),) = cluster.states_of_groups().values()
    assert (state, len(nodes)) == ("PENDING", 3)
    assert engine.waiting() == [0, 1, 2]
    engine.stop([0, 1, 2])
    assert collect_exits(engine, 3) == dict.fromkeys(range(3), -9)
    wait_for(lambda: engine.poll(0.1) == [] and not cluster.groups(), "they are not withdrawn")


def waiting_agents(cluster):
    return [state for state in cluster.states_of_agents() if state == "PENDING_CREATION"]


def test_a_lost_member_of_a_gang_gets_its_place_back(cluster, make, tmp_path):
    engine = make(gang_size=2, resources={"CPU": 2})
    engine.start([launch(0, "wait"), launch(1, "wait")])
    wait_ready(tmp_path, 0, 1, engine=engine)
    before = cluster.groups()
    assert [len(set(nodes)) for nodes in before.values()] == [2]
    agent_above(psutil.Process(*pids(tmp_path, 0))).parent().kill()
    assert [one.seat for one in wait_exits(engine, 1)] == [0]
    engine.start([launch(2, "wait")])
    wait_ready(tmp_path, 2, engine=engine)
    assert cluster.groups() == before
    assert engine.running() == [1, 2]


def test_a_killed_bridge_leaves_nothing_behind(make, tmp_path):
    engine = make()
    engine.start([launch(0, "wait"), launch(1, "wait")])
    wait_ready(tmp_path, 0, 1, engine=engine)
    os.kill(next(iter(engine.agent_pids().values())), signal.SIGKILL)
    (one,) = wait_exits(engine, 1)
    wait_gone(*pids(tmp_path, one.seat))
    assert engine.running() == [1 - one.seat]
    engine.start([launch(5, "0")])
    assert collect_exits(engine, 1) == {5: 0}


def test_a_place_that_is_withdrawn_as_its_agent_starts_is_given_back(monkeypatch):
    """The engine sends SIGTERM, then closes the input. Python may see them in the other order, and a closed input alone
    is the death of the driver."""
    import ray

    from shoal.fleet.agents.ray_bridge import Bridge

    class LateSignal(Bridge):
        def _take_input(self):
            goes_on = super()._take_input()
            self._withdrawn.notify()
            return goes_on

        def _pass_reports(self):
            pass

    given_back = []
    keeper = SimpleNamespace(
        hear=SimpleNamespace(remote=lambda name: None), give_back=SimpleNamespace(remote=given_back.append)
    )
    monkeypatch.setattr(ray, "wait", lambda found, timeout: None)
    closed, end = os.pipe()
    os.close(end)
    own_input = os.dup(0)
    try:
        os.dup2(closed, 0)
        bridge = LateSignal(keeper, {"name": "run/1", "attach": False}, 1, Wakeup())
        bridge._number = 1  # the agent runs, and has not said so
        bridge.run()
    finally:
        os.dup2(own_input, 0)
        os.close(own_input)
        os.close(closed)
    assert given_back == ["run/1"]


def test_a_killed_actor_takes_its_agent_along(make, tmp_path):
    engine = make()
    engine.start([launch(0, "wait")])
    wait_ready(tmp_path, 0, engine=engine)
    agent = agent_above(psutil.Process(*pids(tmp_path, 0)))
    assert "AgentActor" in " ".join(agent.parent().cmdline())
    agent.parent().kill()
    (one,) = wait_exits(engine, 1)
    assert (one.seat, one.code) == (0, None)
    wait_gone(*pids(tmp_path, 0), agent.pid)
    engine.start([launch(1, "7")])
    assert collect_exits(engine, 1) == {1: 7}


def test_a_node_that_dies_ends_its_seats_and_others_start_elsewhere(cluster, make, tmp_path):
    engine = make()
    engine.start([launch(0, "wait")])
    wait_ready(tmp_path, 0, engine=engine)
    ((node,),) = cluster.groups().values()
    os.kill(cluster.ask(do="nodes")["nodes"][node], signal.SIGKILL)
    (one,) = wait_exits(engine, 1)
    assert (one.seat, one.code) == (0, None)
    wait_gone(*pids(tmp_path, 0))
    engine.start([launch(1, "7")])
    assert collect_exits(engine, 1) == {1: 7}
    cluster.ask(do="add")


def test_a_drained_node_asks_its_processes_to_leave(cluster, make, tmp_path):
    engine = make()
    engine.start([launch(0, "wait")])
    wait_ready(tmp_path, 0, engine=engine)
    ((node,),) = cluster.groups().values()
    assert cluster.ask(do="drain", node=node)["done"]
    (one,) = wait_exits(engine, 1)
    assert one.code == -signal.SIGTERM  # it does not know the signal; a worker leaves
    engine.start([launch(1, "wait")])
    wait_ready(tmp_path, 1, engine=engine)
    wait_for(lambda: engine.poll(0.1) == [] and len(cluster.groups()) == 1, "the group on the drained node is left")
    assert cluster.groups().popitem()[1] != [node]
    cluster.ask(do="add")


def test_what_does_not_fit_waits_and_is_withdrawn(cluster, make):
    engine = make(resources={"no_such_thing": 1})
    engine.start([launch(0, "0")])
    wait_for(lambda: engine.poll(0.1) == [] and len(cluster.groups()) == 1, "nothing was asked for")
    assert engine.waiting() == [0]
    engine.stop([0])
    assert collect_exits(engine, 1) == {0: -9}
    wait_for(lambda: engine.poll(0.1) == [] and not cluster.groups(), "it is not withdrawn")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"address": "127.0.0.1:9"}, "SH657"),
        ({"python": "/no/such/python"}, "SH657.*/no/such/python"),
        ({"python": "/usr/bin/false"}, "SH657"),
    ],
)
def test_what_ray_cannot_start_is_told(make, fields, told):
    engine = make(**fields)
    engine.start([launch(0, "0")])
    (one,) = wait_exits(engine, 1)
    assert re.search(told, str(one.start_error), re.DOTALL), str(one.start_error)


DRIVER = """
    import os, sys
    from pathlib import Path
    from shoal.fleet.engines.make import ray_engine
    from shoal.fleet.forkserver import ForkServer
    from shoal.spec.engine import RayEngineConfig
    from shoal.spec.run_paths import RunPaths
    from tests.fleet.engine_contract import launch
    root, address, name, patience_s = sys.argv[1:]
    config = RayEngineConfig(kind="ray", address=address, python=f"{root}/python", resources={name: 1} if name else {})
    fork_server = ForkServer(os.environ, ["seat_entry"], at_once=False)
    engine = ray_engine(config, RunPaths(Path(root)), fork_server, patience_s=float(patience_s))
    engine.start([launch(0, "wait")])
    while True:
        engine.poll(1)
"""


@contextlib.contextmanager
def killed_driver(cluster, root, *, patience_s, resource=""):
    """A driver that asked for a process, in another process. It is killed when the block ends."""
    command = [sys.executable, "-c", textwrap.dedent(DRIVER), str(root), cluster.address, resource, str(patience_s)]
    path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}) as driver:
        wait_for(lambda: len(cluster.groups()) == 1, "nothing was asked for")
        yield
        driver.kill()


def test_another_driver_takes_over_from_one_that_was_killed(cluster, make, tmp_path):
    with killed_driver(cluster, tmp_path, patience_s=600):
        wait_ready(tmp_path, 0)
        before = pids(tmp_path, 0)
    engine = make()
    assert engine.reattach() == [Seat(number=0)]
    assert [psutil.Process(pid).is_running() for pid in before] == [True] * len(before)
    engine.start([launch(1, "7")])
    assert collect_exits(engine, 1) == {1: 7}
    engine.stop([0])
    assert collect_exits(engine, 1) == {0: -9}
    wait_gone(*before)


@pytest.mark.parametrize("resource", ["", "no_such_thing"], ids=["running", "waiting"])
def test_nothing_is_left_when_no_driver_comes_back(cluster, make, tmp_path, resource):
    with killed_driver(cluster, tmp_path, patience_s=1, resource=resource):
        if not resource:
            wait_ready(tmp_path, 0)
    wait_for(lambda: not cluster.groups(), "the group waits for ever")
    wait_gone(*([] if resource else pids(tmp_path, 0)))
    assert make().reattach() == []


def test_a_killed_keeper_takes_its_workers_along(cluster, make, tmp_path):
    """Ray ends what an actor owns, and the engine asks for others."""
    engine = make()
    engine.start([launch(0, "wait")])
    wait_ready(tmp_path, 0, engine=engine)
    for keeper in keepers():
        keeper.kill()
    (one,) = wait_exits(engine, 1)
    assert one.code is None
    wait_gone(*pids(tmp_path, 0))
    engine.start([launch(1, "7")])
    assert collect_exits(engine, 1) == {1: 7}


def keepers():
    return [one for one in psutil.process_iter(["cmdline"]) if "SeatKeeper" in " ".join(one.info["cmdline"] or [])]


def test_a_run_that_has_ended_leaves_no_keeper(make, tmp_path):
    engine = make()
    engine.start([launch(0, "0")])
    assert collect_exits(engine, 1) == {0: 0}
    assert keepers()
    engine.close()
    wait_for(lambda: not keepers(), "a keeper is left")
