"""What every body of the Engine seam must do. A test module of a body subclasses `EngineContract`.

The subclass has a fixture `make_engine`: each call gives another engine for the same run, as successive drivers would
make them. It runs the program "seat_entry", whose last argument says what to do: a number is an exit code, `crash`
raises, and `wait` makes the file `ready-SEAT` in the test's directory and waits until it is killed.

`outlives_driver` is False for a body whose processes end with the driver that started them.
"""

import select
import time

import psutil
import pytest

from shoal.fleet.engine import Launch, Node
from shoal.spec.view import Seat

PATIENCE_S = 120


def launch(seat, word, *, role="worker", node=None):
    return Launch(Seat(number=seat, role=role), "seat_entry", (word,), node=node)


def wait_exits(engine, number):
    found, until = [], time.monotonic() + PATIENCE_S
    while len(found) < number and time.monotonic() < until:
        found += engine.poll(1)
    return found


def collect_exits(engine, number):
    return {one.seat: one.code for one in wait_exits(engine, number)}


def wait_ready(directory, *seats, engine=None):
    """`engine` is polled meanwhile: some bodies start processes only then."""
    until = time.monotonic() + PATIENCE_S
    while not all((directory / f"ready-{seat}").exists() for seat in seats):
        assert time.monotonic() < until, f"seats {seats} did not get ready"
        assert engine is None or engine.poll(0) == []
        time.sleep(0.01)  # there is no other sign of life that all bodies have


class EngineContract:
    outlives_driver = True

    @pytest.fixture
    def engine(self, make_engine):
        made = make_engine()
        yield made
        made.close()

    def test_capacity_names_machines_that_can_be_used(self, engine):
        nodes = engine.capacity()
        assert nodes
        assert all(isinstance(node, Node) and node.name and node.cores > 0 and node.gpus >= 0 for node in nodes)
        engine.start([launch(0, "0", node=nodes[0].name)])
        assert collect_exits(engine, 1) == {0: 0}

    def test_an_unknown_node_is_refused_and_nothing_is_started(self, engine):
        with pytest.raises(ValueError, match="nowhere"):
            engine.start([launch(0, "0"), launch(1, "0", node="nowhere")])
        assert engine.running() == []

    def test_every_seat_is_reported_once_however_it_ended(self, engine):
        engine.start([launch(0, "0"), launch(1, "7"), launch(2, "crash")])
        assert engine.running() == [0, 1, 2]
        assert collect_exits(engine, 3) == {0: 0, 1: 7, 2: 1}
        assert engine.poll(0) == []
        assert engine.running() == []

    def test_a_program_that_cannot_be_started_is_an_exit(self, engine):
        engine.start([Launch(Seat(number=0), "no_such_program")])
        assert collect_exits(engine, 1) == {0: 1}

    def test_the_reason_completes_a_sentence(self, engine):
        engine.start([launch(0, "7")])
        (one,) = wait_exits(engine, 1)
        assert one.reason == "exit code 7"

    def test_stop_ends_the_named_seats_and_no_others(self, engine, tmp_path):
        engine.start([launch(0, "wait"), launch(1, "wait")])
        wait_ready(tmp_path, 0, 1, engine=engine)
        engine.stop([1, 99])
        (one,) = wait_exits(engine, 1)
        assert (one.seat, one.code, one.reason) == (1, -9, "SIGKILL")
        assert engine.poll(0) == []
        assert engine.running() == [0]

    def test_a_seat_is_stopped_before_it_is_up(self, engine):
        engine.start([launch(0, "wait")])
        engine.stop([0])
        engine.stop([0])
        assert collect_exits(engine, 1) == {0: -9}
        assert engine.poll(0) == []

    def test_a_seat_that_runs_cannot_be_started_again(self, engine):
        engine.start([launch(3, "wait")])
        with pytest.raises(ValueError, match="worker-3"):
            engine.start([launch(4, "wait"), launch(3, "wait")])
        assert engine.running() == [3]

    def test_poll_returns_in_time_if_nothing_happens(self, engine):
        engine.start([launch(0, "wait")])
        begun = time.monotonic()
        assert engine.poll(0.05) == []
        assert time.monotonic() - begun < 5

    def test_the_descriptor_is_readable_when_a_process_ended(self, engine):
        engine.start([launch(0, "7")])
        until, found = time.monotonic() + PATIENCE_S, []
        while not found and time.monotonic() < until:
            ready, _, _ = select.select([engine], [], [], PATIENCE_S)
            assert ready, "the process ended, and the descriptor did not say so"
            found = engine.poll(0)
        assert [one.code for one in found] == [7]

    def test_another_driver_takes_over_what_runs(self, make_engine, tmp_path):
        first = make_engine()
        first.start([launch(5, "wait"), launch(2, "wait", role="server")])
        wait_ready(tmp_path, 2, 5, engine=first)
        second = make_engine()
        if not self.outlives_driver:
            assert second.reattach() == []
            first.close()
            second.close()
            return
        try:
            assert second.reattach() == [Seat(number=2, role="server"), Seat(number=5)]
            assert second.running() == [2, 5]
            assert second.poll(0) == []
            second.stop([5])
            (one,) = wait_exits(second, 1)
            assert (one.seat, one.code in (None, -9)) == (5, True)
            assert one.reason
        finally:
            second.close()
        assert second.running() == []

    def test_there_is_nothing_to_take_over_in_a_new_run(self, engine):
        assert engine.reattach() == []

    def test_nothing_is_left_after_close(self, make_engine, tmp_path):
        engine = make_engine()
        engine.start([launch(0, "wait"), launch(1, "wait")])
        wait_ready(tmp_path, 0, 1, engine=engine)
        engine.close()
        assert make_engine().reattach() == []


class AgentContract(EngineContract):
    """A body whose processes are tied to an agent. The program writes its pid to the file `pid-SEAT`."""

    def test_a_killed_agent_takes_its_processes_along_and_others_start(self, engine, tmp_path):
        engine.start([launch(0, "wait")])
        wait_ready(tmp_path, 0, engine=engine)
        process = psutil.Process(int((tmp_path / "pid-0").read_text()))
        agent_above(process).kill()
        (one,) = wait_exits(engine, 1)
        assert (one.seat, one.code) == (0, None)
        process.wait(PATIENCE_S)
        engine.start([launch(1, "7")])
        assert collect_exits(engine, 1) == {1: 7}


def agent_above(process):
    """The agent that started the process, through its fork server."""
    (agent,) = [one for one in process.parents() if one.cmdline()[-1:] == ["shoal.fleet.agents.host_agent"]]
    return agent


def kill_above(pid, killed):
    """Kill the worker `pid`, the agent above it, or the actor above that; return the pids of all that ended
    with it."""
    worker = psutil.Process(pid)
    agent = agent_above(worker)
    top = {"worker": worker, "agent": agent, "actor": agent.parent()}[killed]
    below = [worker, *top.children(recursive=True)]
    top.kill()
    _, alive = psutil.wait_procs(below, PATIENCE_S)
    assert not alive, f"the {killed} was killed, and these live on: {alive}"
    return {one.pid for one in below}
