"""The driver's control port under a fuzzer that knows the protocol and has the token, while two workers train.

A script is some connections: a greeting, then messages of its role, valid or mutated or raw bytes. The run must end
with the same bits as without the attack, and lose no worker of its own.
"""

import contextlib
import json
import socket
import time

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from shoal.fleet.driver_address import read_driver_address
from shoal.net import messages as net_messages
from shoal.net.errors import LinkError
from shoal.net.handshake import MAX_HELLO_BYTES
from shoal.net.listener import connect_host
from tests.conftest import MLP
from tests.fleet.test_messages import VALID
from tests.fuzz.foe import HELLO, STARTED
from tests.fuzz.grammar import damaged, json_values, mutated, raw_bytes
from tests.jobs.background_run import background_run
from tests.jobs.fault_injection import assert_same, events_of_kind, reference_receipt
from tests.jobs.test_receipt import BUILT, FINISHED

TIMEOUT_S = 30
PARTS = 8
HONEST_ROWS_PER_S = 2 * 5
"""Two workers send four heartbeats a second, and few other rows."""
HELLOS = [
    HELLO,
    HELLO | {"seat": 0, "attachment": STARTED},
    HELLO | {"seat": 1, "view": 3, "training": True},
    {"role": "server", "seat": 0, "attachment": STARTED, "pid": 1, "host": "foe", "address": HELLO["address"]},
    {"role": "agent", "host": "foe", "agent": "a secret"},
    {"role": "user"},
]
ROWS = [
    {"kind": "finished", "step": 60, **FINISHED},
    {"kind": "built", **BUILT},
    {"kind": "joined", "step": 3, "lanes": [0], "view": 4, "saves": False},
    {"kind": "step", "step": 5, "steps": 2, "samples": 20, "compute_s": 0.5, "loss": float("nan")},
    {"kind": "note", "message": "hello"},
    {"kind": "failed", "code": "SH401", "message": "the loss is NaN"},
    {"kind": "run_ended", "status": "finished"},
    {"kind": "saved", "step": 7, "size_bytes": 3},
]


SEAT = "worker-SEAT"
"""Stands for the name that the driver gives to the sender."""


@st.composite
def messages(draw, role):
    """One message as bytes: most are those of the role, some valid, most mutated."""
    if draw(st.integers(0, 9)) == 0:
        return draw(raw_bytes) + b"\n"
    _, kind, fields = draw(st.sampled_from([one for one in VALID if one[0] == role] or VALID))
    said = {"kind": kind} | fields
    if kind == "event":
        row = {"t": 1.0, "who": SEAT} | draw(st.sampled_from(ROWS))
        said["row"] = json.dumps(draw(mutated(row)) if draw(st.booleans()) else row)
    act = draw(st.sampled_from(("valid", "mutated", "mutated", "damaged", "another")))
    if act == "mutated":
        said = draw(mutated(said))
    elif act == "another":
        said |= draw(st.dictionaries(st.sampled_from(["kind", "seat", "view", "position", "x"]), json_values))
    line = json.dumps(said).encode()
    return (draw(damaged(line)) if act == "damaged" else line) + b"\n"


@st.composite
def scripts(draw):
    """A greeting, valid or not; the valid one of its role; and messages."""
    hello = draw(st.sampled_from(HELLOS))
    said = draw(mutated(hello)) if draw(st.integers(0, 2)) == 0 else hello
    encoded = json.dumps(said).encode()
    lines = [draw(messages(hello["role"])) for _ in range(draw(st.integers(1, 12)))]
    return encoded if len(encoded) < MAX_HELLO_BYTES else b"{}", json.dumps(hello).encode(), lines


class Fuzzer:
    """Carries out scripts. A script that is disconnected greets again and goes on."""

    def __init__(self, address):
        self.address = address
        self.hellos = 0

    def carry_out(self, first_hello, next_hello, lines):
        sock, seat = self._connect(first_hello)
        for line in lines:
            if _is_closed(sock):
                sock.close()
                sock, seat = self._connect(next_hello)
            with contextlib.suppress(OSError):
                sock.sendall(line.replace(SEAT.encode(), f"worker-{seat}".encode()))
        sock.close()

    def _connect(self, hello):
        """A connection and the seat that it got. The driver never refuses who knows the token before it has read the
        hello."""
        self.hellos += 1
        try:
            sock = connect_host(self.address.host, self.address.port, self.address.token, hello)
        except LinkError as failure:
            raise AssertionError(f"the driver is not there any more: {failure}") from failure
        sock.settimeout(TIMEOUT_S)
        with contextlib.suppress(OSError, ValueError), sock.makefile("rb") as lines:
            for line in lines:
                if (row := json.loads(line))["kind"] == "welcome":
                    return sock, row.get("seat", 0)
        return sock, 0


def _is_closed(sock):
    """Whether the other side has hung up. What it has sent is thrown away."""
    sock.setblocking(False)
    try:
        while sock.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    finally:
        sock.settimeout(TIMEOUT_S)
    return True


@pytest.fixture
def received(monkeypatch):
    """One entry for each row that the driver's own port has read. Workers read theirs in other processes."""
    found = []
    decode = net_messages.decode_message

    def count(line):
        found.append(len(line))
        return decode(line)

    monkeypatch.setattr(net_messages, "decode_message", count)
    return found


def attack(run, job_dir, received, *, examples, steps, start=0):
    """A run that is attacked ends as the reference does. Returns how many greetings and rows of the attack the driver
    has read."""
    job, ready = MLP | {"steps": steps, "evaluate": {"every_steps": steps // 2}}, job_dir / "ready"
    watchers = [{"name": "delays.py:SlowSteps", "args": {"seconds": 1.0, "until": str(ready)}}]
    with background_run(run, job, workers=2, watchers=watchers) as it:
        it.wait_for_workers(2)
        began_s = time.monotonic()
        received.clear()
        fuzzer = Fuzzer(read_driver_address(it.paths.driver_address))

        @seed(start)
        @settings(
            max_examples=examples, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
        )
        @given(scripts())
        def fuzz(script):
            fuzzer.carry_out(*script)

        try:
            fuzz()
            rows = len(received) - round(HONEST_ROWS_PER_S * (time.monotonic() - began_s))
            assert not it.outcome.done(), it.outcome.result()
        except AssertionError as failure:
            failure.add_note(f"the run: {it.outcome}")
            raise
        finally:
            ready.touch()
    outcome = it.outcome.result()
    assert_same(outcome, reference_receipt(run, job))
    own = {"worker-0", "worker-1"}
    assert not [event for event in events_of_kind(outcome, "worker_died") if event["worker"] in own]
    assert not [event for event in events_of_kind(outcome, "evicted") if event.get("worker") in own]
    assert events_of_kind(outcome, "refused")
    assert events_of_kind(outcome, "run_ended")[0]["refused"] > examples // 4
    return fuzzer.hellos + rows


def test_hundreds_of_messages_change_nothing(run, job_dir, received):
    assert attack(run, job_dir, received, examples=80, steps=60) > 300


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_seventy_thousand_messages_change_nothing(run, job_dir, received, part):
    assert attack(run, job_dir, received, examples=1800, steps=600, start=1 + part) >= 70_000 // PARTS


def test_the_fuzzer_would_notice(job_dir):
    """A driver that is gone is found by the next conversation."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    address = type("Address", (), {"host": "127.0.0.1", "port": port, "token": "t"})
    with pytest.raises(AssertionError, match="not there any more"):
        Fuzzer(address)._connect(b"{}")
