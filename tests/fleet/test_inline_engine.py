"""The engine whose processes are threads."""

import pytest

from shoal.fleet.engines.inline import InlineEngine, InlineMachine
from tests.fleet.engine_contract import EngineContract, collect_exits, launch


def seat_entry(directory):
    def main(seat, arguments, killed):
        word = arguments[-1]
        if word == "wait":
            (directory / f"ready-{seat.number}").touch()
            killed.wait()
            return 3  # nobody asks a killed process for its code
        if word == "crash":
            raise KeyError("oh")
        return int(word)

    return main


@pytest.fixture
def machine(tmp_path):
    return InlineMachine({"seat_entry": seat_entry(tmp_path)})


class TestInlineEngine(EngineContract):
    @pytest.fixture
    def make_engine(self, machine):
        return lambda: InlineEngine(machine, "run")


def test_runs_on_one_machine_do_not_see_each_other(machine):
    one, two = InlineEngine(machine, "one"), InlineEngine(machine, "two")
    one.start([launch(0, "1")])
    two.start([launch(0, "2")])
    assert collect_exits(two, 1) == {0: 2}
    assert collect_exits(one, 1) == {0: 1}


def test_an_exit_that_nobody_saw_is_reported_by_the_next_driver(machine):
    InlineEngine(machine, "run").start([launch(0, "4")])
    machine.processes["run", 0].join()
    engine = InlineEngine(machine, "run")
    assert [seat.number for seat in engine.reattach()] == [0]
    assert collect_exits(engine, 1) == {0: 4}
