"""The agent: commands in, reports out."""

import os

import pytest

from shoal.fleet.agents.agent import Agent, LaunchCommand, StopCommand
from shoal.fleet.forkserver import ForkServer
from shoal.fleet.messages import ExitedReport, OutputReport
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import Seat

ENTRY = """
import sys, time
def main():
    print("first", flush=True)
    print("second", flush=True)
    if sys.argv[-1] == "wait":
        time.sleep(1000)
    print("it went wrong", file=sys.stderr)
    sys.exit(int(sys.argv[-1]))
"""


@pytest.fixture
def reports():
    return []


@pytest.fixture
def agent(tmp_path, reports):
    (tmp_path / "agent_entry.py").write_text(ENTRY)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    with ForkServer(environment, ["agent_entry"]) as fork_server:
        made = Agent(RunPaths(tmp_path), fork_server, environment=environment, report=reports.append)
        yield made
        made.close()


def launch(seat, word, role="worker"):
    """As it comes over the control channel."""
    command = LaunchCommand(seat=Seat(number=seat, role=role), entry="agent_entry", arguments=[word])
    return LaunchCommand.model_validate_json(command.model_dump_json())


def run_to_the_end(agent):
    while agent.running():
        agent.poll(1)


def test_output_is_reported_line_by_line_and_then_the_exit(agent, reports):
    agent.obey(launch(2, "7", role="server"))
    run_to_the_end(agent)
    assert reports == [
        OutputReport(seat=2, text="first"),
        OutputReport(seat=2, text="second"),
        ExitedReport(seat=2, code=7, reason="exit code 7", errors="it went wrong\n"),
    ]


@pytest.mark.parametrize(("how", "reason"), [("terminate", "SIGTERM"), ("kill", "SIGKILL")])
def test_a_stop_reaches_the_named_seats_alone(agent, reports, how, reason):
    agent.obey(launch(0, "wait"))
    agent.obey(launch(1, "wait"))
    while len(reports) < 4:  # both are up: before that, a fork hears no signals
        agent.poll(0.05)
    agent.obey(StopCommand(seats=[1, 9], how=how))
    while agent.running() != [0]:
        agent.poll(1)
    assert [(report.seat, report.reason) for report in reports if report.kind == "exited"] == [(1, reason)]


def test_nothing_is_left_when_the_agent_is_closed(agent):
    agent.obey(launch(0, "wait"))
    agent.close()
    assert agent.running() == []
