"""What may outlive a driver is on record, and one bridge at a time speaks with it. No Ray is needed for that."""

import pytest

from shoal.fleet.agents.ray_actor import REPLACED, AgentActor
from shoal.fleet.engines.agent_records import AgentRecords
from shoal.spec.run_paths import RunPaths


def test_the_next_driver_finds_what_the_last_one_had(tmp_path):
    first = AgentRecords(RunPaths(tmp_path))
    assert [first.add(), first.add(), first.add()] == [1, 2, 3]
    first.remove(2)
    second = AgentRecords(RunPaths(tmp_path))
    assert second.kept == first.kept
    assert second.kept.numbers == (1, 3)
    assert second.add() == 4, "a number is never used again"


@pytest.mark.parametrize("content", ["", "[]", "{", '{"keeper": "a/b"}', '{"keeper": "a", "numbers": [-1]}'])
def test_a_damaged_record_names_nothing(tmp_path, content):
    RunPaths(tmp_path).kept_agents.write_text(content)
    assert AgentRecords(RunPaths(tmp_path)).kept.numbers == ()


def test_runs_of_one_name_have_keepers_of_their_own(tmp_path):
    paths = [RunPaths(tmp_path / name / "mlp-1") for name in ("a", "b")]
    assert len({AgentRecords(one).kept.keeper for one in paths}) == 2


@pytest.fixture
def actor(tmp_path):
    """Its agent says what it hears, in pieces that end within a line."""
    agent = tmp_path / "agent"
    agent.write_text('#!/bin/sh\nprintf first\nread line\nprintf " line\\n"\nexec cat\n')
    agent.chmod(0o755)
    made = AgentActor(str(agent), "module")
    yield made
    made.write(made.attach(), b"")
    assert made.end() == (0, b"")


def read_line(actor, bridge, received):
    while not (found := actor.read(bridge, received))[1]:
        pass
    return found


def test_a_new_bridge_gets_the_last_lines_again_and_the_old_one_nothing(actor):
    old = actor.attach()
    actor.write(old, b"go\n")
    assert read_line(actor, old, 0) == (1, b"first line\n")
    new = actor.attach()
    actor.write(old, b"ignored\n")
    actor.write(new, b"heard\n")
    assert actor.read(old, 1) == (REPLACED, None)
    assert read_line(actor, new, -1) == (1, b"first line\n")
    assert read_line(actor, new, 1) == (2, b"heard\n")
