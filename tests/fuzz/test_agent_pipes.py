"""The pipes between a driver and the agents on its hosts: an agent that does not keep to the protocol costs its own
host's processes, and a driver that does not costs its own agent, which leaves nothing behind.

`make test` sends some hundred lines to each side, `make test-all` some ten thousand.
"""

import contextlib
import fcntl
import itertools
import json
import os
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.fleet.agents.agent_pipe import (
    BANNER,
    MAX_LINE_BYTES,
    AttachCommand,
    PipeReader,
    SetupCommand,
    parse_command,
)
from shoal.fleet.agents.host_agent import SCRATCH_PREFIX
from shoal.fleet.engine import Node
from shoal.fleet.engines import host_link
from shoal.fleet.engines.agent_pool import AgentPool
from shoal.fleet.engines.agent_records import AgentRecords
from shoal.fleet.engines.agents import AgentEngine, HostRetry
from shoal.fleet.engines.host_link import AgentHost
from shoal.fleet.engines.make import AGENT_MODULE, apart_hosts, explain_agent
from shoal.fleet.platform_facts import platform_facts
from shoal.net.errors import ProtocolError
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import Seat
from tests.conftest import long_only
from tests.fleet.engine_contract import PATIENCE_S, collect_exits, launch, wait_ready
from tests.fleet.test_agent_engine import fake_host, fork_server  # noqa: F401  # a fixture
from tests.fuzz.grammar import damaged, mutated, raw_bytes
from tests.fuzz.test_files import examples

FEW, MANY = 20, 2500
FACTS = {name: fact for name, fact in platform_facts().items() if name not in ("torch", "processor")}
"""Those of a fork server that has not imported torch."""
SEAT = 77_777
"""Stands for the seat that the driver gave to the agent."""
ERROR = {"code": "SH401", "message": "the model failed", "where": "model.py:3", "fix": "Mend it."}
GREETING = [{"kind": "ready", "platform": FACTS}]
REPORTS = [
    {"kind": "ready", "platform": FACTS},
    {"kind": "ready", "platform": FACTS | {"machine": "pdp11"}},
    {"kind": "running", "seats": [{"number": SEAT, "role": "worker"}, {"number": 0}], "platform": FACTS},
    {"kind": "pong"},
    {"kind": "failed", "error": ERROR},
    {"kind": "leaving"},
    {"kind": "output", "seat": SEAT, "text": "loss 0.5\x1b[2J"},
    {"kind": "output", "seat": 0, "text": "of another"},
    {"kind": "exited", "seat": SEAT, "code": 1, "reason": "exit code 1", "errors": "Traceback", "start_error": ERROR},
    {"kind": "exited", "seat": SEAT, "code": -9, "reason": "SIGKILL", "start_error": None},
    {"kind": "exited", "seat": 0, "code": 0, "reason": "of another"},
]
COMMANDS = [
    {"kind": "setup", "environment": {"A": "b"}, "modules": [], "machine": "", "notice": "", "patience_s": 60.0},
    {"kind": "attach"},
    {"kind": "ping"},
    {"kind": "launch", "seat": {"number": 3, "role": "worker"}, "entry": "no_such_module", "arguments": ["0"]},
    {"kind": "launch", "seat": {"number": 4, "role": "server"}, "entry": "os", "environment": {"K": "v"}, "reach": "x"},
    {"kind": "stop", "seats": [3, 4, 10**30], "how": "terminate"},
    {"kind": "stop", "seats": [3], "how": "kill"},
]


@st.composite
def lines(draw, messages):
    """A line: valid, nearly valid, or noise."""
    said = draw(st.sampled_from(messages))
    how = draw(st.sampled_from(["valid", "mutated", "mutated", "damaged", "raw"]))
    if how == "raw":
        return draw(raw_bytes).replace(b"\n", b"")
    line = json.dumps(draw(mutated(said)) if how == "mutated" else said).encode()
    return (draw(damaged(line)) if how == "damaged" else line).replace(b"\n", b"")


def scripts(messages, most=8):
    return st.lists(lines(messages), min_size=1, max_size=most)


# ---- what agents say ----


class Hosts:
    """An engine with an honest host, whose worker waits, and one that says what it is told to say and ends."""

    def __init__(self, root, fork_server):  # noqa: F811
        self.root, self.seats, self.lines = root, itertools.count(1), 0
        self._greeting, self._reports = root / "greeting", root / "reports"
        # it reads the setup, and waits for a launch only after a greeting that brings one
        script = f"cat {self._greeting}; if test -s {self._reports}; then read a; read b; cat {self._reports}; fi"
        self._say([], [])
        (honest,) = apart_hosts(1, fork_server)
        self.paths = RunPaths(root / "run")
        self.engine = AgentEngine([honest, fake_host("foe", script)], self.paths)
        self.attack(GREETING_LINES, [json.dumps({"kind": "pong"}).encode()])
        self.engine.start([launch(0, "wait", node="machine-0")])
        wait_ready(root, 0, engine=self.engine)

    def _say(self, greeting, reports):
        self._greeting.write_bytes(b"".join(line + b"\n" for line in [BANNER, *greeting]))
        self._reports.write_bytes(b"".join(line + b"\n" for line in reports))

    def attack(self, greeting, reports):
        """Let the foe be started for a seat, say this, and end."""
        seat, exits, until = next(self.seats), [], time.monotonic() + PATIENCE_S
        reports = [line.replace(str(SEAT).encode(), str(seat).encode()) for line in reports]
        self._say(greeting, reports)
        self.engine._retries["foe"] = retry = HostRetry(0.0)
        self.engine.start([launch(seat, "wait", node="foe")])
        while not retry.at_s:  # until it is lost
            assert time.monotonic() < until, "the foe's host is still there"
            exits += self.engine.poll(0.05)
        self.engine.stop([seat])
        while seat in self.engine.running():
            assert time.monotonic() < until, "its seat is still there"
            exits += self.engine.poll(0.05)
        exits += self.engine.poll(0)
        assert [one.seat for one in exits] == [seat]
        assert self.engine._failure is None, self.engine._failure
        self.lines += len(greeting) + len(reports)

    def check(self):
        """The honest worker was not disturbed, and another one can be started beside it."""
        assert self.engine.running() == [0]
        seat = next(self.seats)
        self.engine.start([launch(seat, "0", node="machine-0")])
        assert collect_exits(self.engine, 1) == {seat: 0}
        logs = {path.name.partition(".")[0] for path in self.paths.logs.iterdir()}
        assert logs <= {f"worker-{n}" for n in range(seat + 1)}
        assert "of another" not in self.paths.log(0).read_text()


GREETING_LINES = [json.dumps(one).encode() for one in GREETING]


@pytest.fixture
def hosts(tmp_path, fork_server):  # noqa: F811
    made = Hosts(tmp_path, fork_server)
    yield made
    made.engine.close()


@pytest.mark.parametrize("count", [FEW, *long_only(MANY)])
def test_reports_of_an_agent_cost_its_own_host_only(hosts, count):
    @examples(count)
    @given(scripts(GREETING * 2 + REPORTS), scripts(REPORTS), st.integers(0, 2))
    def attack(greeting, reports, how):
        if how == 0:  # the greeting itself
            hosts.attack(greeting, [])
        else:
            hosts.attack(GREETING_LINES, reports)

    attack()
    hosts.check()
    assert hosts.lines > 3 * count


def test_what_an_agent_may_not_say_costs_its_own_host_only(hosts):
    """Errors without their words, another machine than it was, a claim that nobody asked for."""
    for words in ({}, {"code": "SH401"}, {"message": "x"}):
        for report in ({"kind": "failed", "error": words}, REPORTS[9] | {"start_error": words}):
            hosts.attack(GREETING_LINES, [json.dumps(report).encode()])
    hosts.attack([json.dumps(REPORTS[1]).encode()], [])
    for report in REPORTS[1:3]:
        hosts.attack(GREETING_LINES, [json.dumps(report).encode()])
    hosts.check()


def test_much_that_has_arrived_is_read_in_parts():
    """Whatever else happens in the same thread has its turn between them."""
    reading, writing = os.pipe()
    capacity = fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 1 << 20)
    said = b"x\n" * (capacity // 2)
    os.write(writing, said)
    os.close(writing)
    reader, parts = PipeReader(reading), []
    while not reader.closed:
        parts.append(reader.read_lines())
    os.close(reading)
    assert sum(map(len, parts)) == len(said) // 2
    assert max(map(len, parts)) <= len(parts[0]) < len(said) // 4


def test_lines_that_cannot_be_logged_are_lost_alone(hosts):
    seat = next(hosts.seats)
    for ending in ("log", "err"):
        (hosts.paths.logs / f"worker-{seat + 1}.{ending}").mkdir()
    reports = [{"kind": "output", "seat": SEAT, "text": "x"}, REPORTS[8]]
    hosts.attack(GREETING_LINES, [json.dumps(one).encode() for one in reports])
    hosts.check()


@pytest.mark.parametrize("where", ["", ">&2"])
def test_an_agent_that_never_pauses_keeps_nobody_waiting(tmp_path, where, monkeypatch):
    """The engine comes back from every poll, and sees the exits of others."""
    monkeypatch.setattr(host_link, "CLOSE_TIMEOUT_S", 0.5)
    ready = json.dumps(GREETING[0])
    pong = '{"kind":"pong"}'
    noise = f"""echo '{BANNER.decode()}'; echo '{ready}'; yes '{pong}' {where} & cat >/dev/null; kill $!"""
    ends = f"""echo '{BANNER.decode()}'; echo '{ready}'; read a; read b;
               echo '{{"kind":"exited","seat":1,"code":7,"reason":"x"}}'; cat >/dev/null"""
    engine = AgentEngine([fake_host("noisy", noise), fake_host("quiet", ends)], RunPaths(tmp_path))
    try:
        engine.start([launch(0, "wait", node="noisy"), launch(1, "wait", node="quiet")])
        assert collect_exits(engine, 1) == {1: 7}
        assert engine.running() == [0]
    finally:
        engine.close()


# ---- what agents that outlived their driver say ----


def reattach(root, said):
    """The seats that an engine takes over from two agents. The first has worker-0, and says so."""
    paths = RunPaths(root)
    records = AgentRecords(paths)
    for seat in (0, 1):
        records.give(records.add(), Seat(number=seat))
    (root / "said").write_bytes(b"".join(line + b"\n" for line in said))
    running = json.dumps({"kind": "running", "seats": [{"number": 0}], "platform": FACTS})
    scripts_of = {1: f"echo '{running}'; cat >/dev/null", 2: f"cat {root / 'said'}"}

    def attach_host(number):
        node = Node(f"job-{number}", cores=1, memory_bytes=0, gpus=0, shares_run_dir=False)
        return AgentHost(node, ("sh", "-c", scripts_of[number]), AttachCommand(), explain_agent)

    pool = AgentPool(attach_host, paths, nodes=[], max_hosts=2, records=AgentRecords(paths), attach_host=attach_host)
    try:
        found = pool.reattach()
        pool.poll(0)
        return [seat.name for seat in found]
    finally:
        pool.close()


@pytest.mark.parametrize("count", [FEW // 2, *long_only(MANY // 5)])
def test_an_agent_claims_the_seat_that_it_was_given_only(tmp_path, count):
    claims = [[{"number": 1}], [{"number": 0}, {"number": 1}], [{"number": 10**9 - 1}], [{"number": 1}] * 3,
              [{"number": 1, "role": "server"}]]  # fmt: skip
    found = []

    @examples(count)
    @given(scripts([{"kind": "running", "seats": one, "platform": FACTS} for one in claims] + REPORTS, most=3))
    def attack(said):
        root = tmp_path / str(len(found))
        root.mkdir()
        found.append(reattach(root, said))

    attack()
    assert len(found) >= count
    assert {tuple(one) for one in found} == {("worker-0",), ("worker-0", "worker-1")}


@pytest.mark.parametrize("claim", [{"number": 10**9 - 1}, {"number": 1, "role": "server"}, {"number": 7}])
def test_a_seat_that_the_driver_did_not_give_is_not_taken_over(tmp_path, claim):
    said = json.dumps({"kind": "running", "seats": [claim], "platform": FACTS}).encode()
    assert reattach(tmp_path, [said]) == ["worker-0"]


# ---- what engines say ----


@pytest.mark.parametrize("count", [FEW * 5, *long_only(MANY * 4)])
def test_commands_are_checked_before_an_agent_obeys(count):
    outcomes = []

    @examples(count)
    @given(lines(COMMANDS))
    def attack(line):
        try:
            command = parse_command(line)
        except ProtocolError:
            outcomes.append("refused")
            return
        outcomes.append(command.kind)
        for seat in [command.seat] if command.kind == "launch" else []:
            assert 0 <= seat.number < 10**9

    attack()
    assert len(outcomes) >= count
    assert set(outcomes) == {"refused", *(one["kind"] for one in COMMANDS)}


def talk_to_agent(scratch, said):
    """Start an agent, say this, close its input, and wait. Returns its exit code and its errors."""
    scratch.mkdir(exist_ok=True)
    environment = os.environ | {"TMPDIR": str(scratch)}
    command = [sys.executable, "-P", "-m", AGENT_MODULE]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment) as agent:
        with contextlib.suppress(BrokenPipeError):
            agent.stdin.write(b"".join(line + b"\n" for line in said))
        _, errors = agent.communicate(timeout=PATIENCE_S)
    return agent.returncode, errors.decode()


@pytest.mark.parametrize("count", [2, *long_only(100)])
def test_an_agent_that_hears_nonsense_ends_and_leaves_nothing(tmp_path, count):
    setup = SetupCommand(environment={}, modules=[]).model_dump_json().encode()
    codes = []

    @examples(count)
    @given(scripts(COMMANDS))
    def attack(said):
        code, errors = talk_to_agent(tmp_path / "scratch", [setup, *said])
        codes.append(code)
        assert code in (0, 1), errors
        assert "Traceback" not in errors
        assert list((tmp_path / "scratch").glob(f"{SCRATCH_PREFIX}*")) == []

    attack()
    assert len(codes) >= count


def test_a_line_without_an_end_ends_the_agent(tmp_path):
    code, errors = talk_to_agent(tmp_path / "scratch", [b"x" * (MAX_LINE_BYTES + 100_000)])
    assert (code, "too long" in errors) == (1, True)
