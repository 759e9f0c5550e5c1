"""Reports of an agent over a real control channel, at the driver."""

import contextlib
import select
import time

import pytest

from shoal.events import EventWriter, read_events
from shoal.fleet.agents.agent_reports import AgentReports
from shoal.fleet.control_client import ControlClient
from shoal.fleet.control_server import ControlServer
from shoal.fleet.driver_address import DriverAddress
from shoal.fleet.messages import ExitedReport, OutputReport, parse_hello
from shoal.fleet.rate_limit import RateLimit
from shoal.net.listener import connect_host
from shoal.net.messages import encode_message
from shoal.spec.run_paths import RunPaths

TOKEN = "a" * 32
SECRET = "b" * 32
PATIENCE_S = 20


class Driver:
    """Listens as a driver does, in the test's own thread."""

    def __init__(self, root):
        self.paths = RunPaths(root)
        self.stream = EventWriter(self.paths.events, "driver")
        self.control = ControlServer(TOKEN)
        self.owners = dict.fromkeys(range(5), SECRET)
        self.reports = AgentReports(self.control, self.paths, self.stream, agent_of=self.owners.get)

    def listen(self, until):
        deadline = time.monotonic() + PATIENCE_S
        while not until():
            assert time.monotonic() < deadline
            select.select([self.control], [], [], 0.1)
            for message in self.control.receive():
                if message.kind == "here":
                    self.reports.admit(message.connection, parse_hello(message.fields))
                elif self.reports.owns_connection(message.connection):
                    self.reports.handle(message)

    def notes(self):
        return [event["message"] for event in read_events(self.paths.events) if event.kind == "note"]

    def log(self, seat):
        path = self.paths.log(seat)
        return path.read_text() if path.exists() else ""

    def close(self):
        self.control.close()
        self.stream.close()


@pytest.fixture
def driver(tmp_path):
    with contextlib.closing(Driver(tmp_path)) as made:
        yield made


@pytest.fixture
def agent(driver):
    address = DriverAddress(driver.control.host, driver.control.port, TOKEN)
    made = ControlClient(lambda: address, lambda: {"role": "agent", "host": "far", "agent": SECRET}, heartbeat=dict)
    with contextlib.closing(made):
        with pytest.raises(Exception, match="SH610"):
            made.connect(0.01)  # starts its thread; nobody listens yet
        driver.listen(lambda: driver.reports._agents)
        made.connect(PATIENCE_S)
        yield made


def send(agent, report):
    agent.send(report.kind, **report.model_dump(exclude={"kind"}))


def test_output_goes_to_the_logs_of_the_run(driver, agent):
    for text in ("one", "two äß"):
        send(agent, OutputReport(seat=3, text=text))
    send(agent, OutputReport(seat=4, text="three"))
    driver.listen(lambda: driver.log(4))
    assert driver.log(3) == "one\ntwo äß\n"
    assert driver.log(4) == "three\n"


def test_an_end_that_the_worker_could_not_explain_is_noted(driver, agent):
    for seat, code, reason in ((0, 0, "exit code 0"), (1, 2, "exit code 2"), (2, -9, "SIGKILL"), (3, None, "x")):
        send(agent, ExitedReport(seat=seat, code=code, reason=reason))
    driver.listen(lambda: len(driver.notes()) == 2)
    assert driver.notes() == ["worker-2 (far) ended by SIGKILL", "worker-3 (far) ended by x"]


@pytest.mark.parametrize(
    "fields",
    [
        {"seat": -1, "text": "x"},
        {"seat": "../x", "text": "x"},
        {"seat": 2**40, "text": "x"},
        {"seat": 1.0, "text": "x"},
        {"seat": 1, "text": "x" * 5000},
        {"seat": 1, "text": ["x"]},
        {"seat": 1, "text": "x", "more": 1},
        {"text": "x"},
        {},
    ],
)
def test_nonsense_costs_the_connection_and_an_agent_may_call_again(driver, agent, fields):
    first = set(driver.reports._agents)
    agent.send("output", **fields)
    driver.listen(lambda: driver.reports._agents and set(driver.reports._agents) != first)
    send(agent, OutputReport(seat=0, text="here again"))
    driver.listen(lambda: driver.log(0))
    assert driver.log(0) == "here again\n"


def test_an_agent_that_goes_is_forgotten(driver, agent):
    agent.close()
    driver.listen(lambda: not driver.reports._agents)
    assert driver.control.refused == 0


@pytest.mark.parametrize("owner", ["", "another agent's secret"])
def test_an_agent_reports_only_the_workers_that_it_started(driver, agent, owner):
    """Seat 3 is the engine's own, or another agent's."""
    driver.owners[3] = owner
    send(agent, ExitedReport(seat=3, code=-9, reason="SIGKILL"))
    driver.listen(lambda: driver.control.refused)
    (refusal,) = driver.control.take_refusals()
    assert refusal.reason == "it reports worker-3, which it did not start"
    assert refusal.name == "the agent on far"
    assert refusal.address.startswith("127.0.0.1:")
    assert driver.notes() == []


def test_an_agent_without_a_secret_owns_no_worker(driver):
    driver.owners[3] = ""
    with connect_host(driver.control.host, driver.control.port, TOKEN, b'{"role": "agent", "host": "far"}') as sock:
        sock.sendall(encode_message("output", {"seat": 3, "text": "x"}))
        driver.listen(lambda: driver.control.refused)
    assert driver.log(3) == ""


def connect_raw(driver, secret):
    hello = b'{"role": "agent", "host": "far", "agent": "%b"}' % secret.encode()
    known = set(driver.reports._agents)
    sock = connect_host(driver.control.host, driver.control.port, TOKEN, hello)
    driver.listen(lambda: set(driver.reports._agents) - known)
    return sock


@pytest.mark.parametrize(("secret", "logged"), [(SECRET, "new\n"), ("another agent", "new\nlate\n")])
def test_lines_of_an_agent_s_older_connection_do_not_come_after_newer_ones(driver, secret, logged):
    with connect_raw(driver, SECRET) as older, connect_raw(driver, secret) as newer:
        driver.owners[2], driver.owners[1] = secret, SECRET
        newer.sendall(encode_message("output", {"seat": 2, "text": "new"}))
        driver.listen(lambda: driver.log(2))
        with contextlib.suppress(OSError):  # the driver has closed it
            older.sendall(encode_message("output", {"seat": 1, "text": "late"}))
        newer.sendall(encode_message("output", {"seat": 3, "text": "end"}) if secret == SECRET else b"")
        driver.listen(lambda: driver.log(3) if secret == SECRET else driver.log(1))
        assert driver.log(2) + driver.log(1) == logged


def test_an_end_is_noted_once_and_an_unknown_seat_not_at_all(driver, agent):
    for seat in (77, 2, 2, 1):
        send(agent, ExitedReport(seat=seat, code=-9, reason="SIG\x1b[2J"))
    driver.listen(lambda: len(driver.notes()) == 2)
    assert driver.notes() == ["worker-2 (far) ended by SIG?[2J", "worker-1 (far) ended by SIG?[2J"]


def test_a_flood_of_output_is_cut_and_said_once(driver, agent):
    driver.reports._limits = dict.fromkeys(driver.reports._limits, RateLimit(0, 1000))
    for _ in range(30):
        send(agent, OutputReport(seat=1, text="a" * 99))
    send(agent, ExitedReport(seat=2, code=-9, reason="SIGKILL"))
    driver.listen(lambda: len(driver.notes()) == 2)
    assert driver.log(1) == ("a" * 99 + "\n") * 10
    assert "print too much" in driver.notes()[0]
