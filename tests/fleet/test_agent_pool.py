"""Hosts on demand: agents as a scheduler would give them. What Slurm prints and sets is read without it."""

import re

import pytest

from shoal.errors import ShoalError
from shoal.fleet.agents.agent_pipe import SetupCommand
from shoal.fleet.engine import Node
from shoal.fleet.engines import agent_pool
from shoal.fleet.engines.agent_pool import AgentPool
from shoal.fleet.engines.host_link import AgentHost
from shoal.fleet.engines.make import explain_agent
from shoal.fleet.engines.slurm import explain_slurm, parse_counts
from shoal.spec.run_paths import RunPaths
from tests.fleet.engine_contract import launch, wait_exits
from tests.fleet.test_agent_engine import ready

WAITS = "exec sleep 1000"
NODES = [Node("queue", cores=8, memory_bytes=0, gpus=0, shares_run_dir=False, seats=8)]


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.setattr(agent_pool, "IDLE_S", 0.05)
    made = []

    def make(*scripts, gang_size=1, gangs=None):
        """The n-th request gets the n-th script, and every further one the last."""

        def make_host(number, gang):
            if gangs is not None:
                gangs.append((number, gang))
            script = scripts[min(number, len(scripts)) - 1]
            node = Node(f"job-{number}", cores=1, memory_bytes=0, gpus=0, shares_run_dir=False)
            setup = SetupCommand(environment={}, modules=[])
            return AgentHost(node, ("sh", "-c", script), setup, explain_agent, queued=True)

        made.append(AgentPool(make_host, RunPaths(tmp_path), nodes=NODES, max_hosts=8, gang_size=gang_size))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def poll_until(engine, condition):
    for _ in range(400):
        assert engine.poll(0.05) == []
        if condition():
            return
    raise AssertionError("it did not happen")


def test_a_seat_starts_while_others_wait(make):
    engine = make(ready("1"), WAITS)
    engine.start([launch(0, "wait"), launch(1, "wait")])
    poll_until(engine, lambda: engine.waiting() == [1])
    assert engine.running() == [0, 1]
    assert [node.name for node in engine.capacity()] == ["queue"]


def test_a_request_that_is_not_needed_any_more_is_withdrawn(make):
    engine = make(WAITS)
    engine.start([launch(0, "wait")])
    poll_until(engine, lambda: len(engine.agent_pids()) == 1)
    engine.stop([0])
    assert [one.code for one in wait_exits(engine, 1)] == [-9]
    poll_until(engine, lambda: engine.agent_pids() == {})


def test_a_host_that_is_asked_for_in_a_queue_may_say_nothing_for_hours(make, monkeypatch):
    monkeypatch.setattr("shoal.fleet.engines.host_link.BANNER_TIMEOUT_S", 0.0)
    engine = make(WAITS)
    engine.start([launch(0, "wait")])
    poll_until(engine, lambda: len(engine.agent_pids()) == 1)
    for _ in range(3):
        assert engine.poll(0.01) == []
    assert engine.waiting() == [0]


def test_a_host_that_differs_is_given_back_and_another_is_asked_for(make):
    engine = make(ready("1"), ready("2"), ready("1"))
    engine.start([launch(0, "wait")])
    poll_until(engine, lambda: engine.waiting() == [])
    engine.start([launch(1, "wait")])
    poll_until(engine, lambda: engine.waiting() == [])
    assert sorted(engine.agent_pids()) == ["job-1", "job-3"]


def test_hosts_that_are_of_use_only_together_are_asked_for_together(make):
    gangs = []
    engine = make(WAITS, gang_size=2, gangs=gangs)
    engine.start([launch(seat, "wait") for seat in range(5)])
    one, two, three = range(1, 2), range(2, 4), range(4, 6)
    assert gangs == [(1, one), (2, two), (3, two), (4, three), (5, three)], "one replaces a lost member of another gang"


def test_if_the_first_request_fails_nothing_can_run(make):
    engine = make("echo refused >&2; exit 3")
    engine.start([launch(0, "wait"), launch(1, "wait")])
    found = wait_exits(engine, 2)
    assert [one.code for one in found] == [1, 1]
    assert re.search("SH629.*exit code 3: refused", str(found[0].start_error))


def test_the_cores_of_an_allocation():
    assert parse_counts("2(x3),4") == [2, 2, 2, 4]
    for text in ("", "x", "2(x3", "2(3)", "-1"):
        with pytest.raises(ShoalError, match="SH656"):
            parse_counts(text)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("srun: job 7 queued and waiting for resources\nsrun: error: invalid partition", "SH656.*invalid partition"),
        ("srun: error: n1: task 0: Exited\n/x/python: No module named shoal", "SH653.*No module named shoal"),
        ("", "SH656.*it said nothing"),
    ],
)
def test_what_srun_said_is_told(said, told):
    assert re.search(told, str(explain_slurm(1, said)))
