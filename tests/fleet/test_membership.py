"""One contract, every membership: within one process, over sockets, and over sockets to another process."""

import contextlib
import json
import subprocess
import sys
import threading
import types

import pytest

from shoal.fleet.control_client import ControlClient
from shoal.fleet.membership import InMemoryMembership
from shoal.net.handshake import new_token
from shoal.spec.view import Address, View
from tests.fleet.fake_driver import TIMEOUT_S, FakeDriver

WORKER = """
import json, sys
from shoal.fleet.driver_address import DriverAddress
from shoal.fleet.control_client import ControlClient

contact = DriverAddress(*json.loads(sys.stdin.readline()))
marks = []
client = ControlClient(
    lambda: contact, lambda: {"seat": 0}, heartbeat=dict, on_welcome=lambda fields: client.send("mark")
)
client.connect(30)
for line in sys.stdin:
    name, arguments = json.loads(line)
    result = getattr(client, name)(*arguments.pop("", []), **arguments)
    print(json.dumps(result.model_dump(mode="json") if hasattr(result, "model_dump") else result), flush=True)
client.close()
"""


class InProcess:
    def __init__(self):
        self.worker = InMemoryMembership()
        self.publish = self.worker.publish

    def close(self):
        pass


class OverSockets:
    """The driver's end is played by a thread; `publish` returns when the worker has the view."""

    def __init__(self):
        self.driver = FakeDriver(new_token())
        self.worker = self.open_worker()

    def open_worker(self):
        def mark(fields):
            client.send("mark")

        client = ControlClient(lambda: self.driver.contact, lambda: {"seat": 0}, heartbeat=dict, on_welcome=mark)
        client.connect(TIMEOUT_S)
        return client

    def publish(self, view):
        marks = len(self.driver.wait_for("mark", self.marks))
        self.driver.publish(view)
        for caller in self.driver.callers:
            self.driver.control.send(caller, "welcome")
        self.driver.wait_for("mark", marks + 1)
        self.published += 1

    published = 0

    @property
    def marks(self):
        return 1 + self.published

    def close(self):
        self.worker.close()
        self.driver.close()


class OverSocketsToProcess(OverSockets):
    """The worker's end is in a process of its own, and is asked over a pipe."""

    def open_worker(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.tell(list(vars(self.driver.contact).values()))
        return types.SimpleNamespace(wait=self.wait, newer=lambda number: self.ask("newer", {"": [number]}))

    def wait(self, seat, **arguments):
        found = self.ask("wait", {"": [seat]} | arguments)
        return found and View.model_validate(found)

    def ask(self, *question):
        self.tell(question)
        return json.loads(self.process.stdout.readline())

    def tell(self, what):
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def close(self):
        self.process.communicate(timeout=TIMEOUT_S)
        self.driver.close()


@pytest.fixture(params=[InProcess, OverSockets, OverSocketsToProcess])
def membership(request):
    with contextlib.closing(request.param()) as made:
        yield made


def test_a_worker_gets_the_view_that_has_it(membership):
    membership.publish(View(number=1, carries={1: [0]}))
    assert membership.worker.wait(0, after=0, position=0, timeout_s=0) is None
    view = View(
        number=2,
        carries={0: [0, 1], 4: [2]},
        addresses={0: Address(host="a", port=1), 4: Address(host="b", port=2, host_id="h", unix="u")},
        position=17,
        source=4,
        saver=0,
    )
    membership.publish(view)
    assert membership.worker.wait(0, after=0, position=0, timeout_s=0) == view


def test_only_newer_views_count(membership):
    assert not membership.worker.newer(0)
    membership.publish(View(number=5, carries={0: [0]}))
    membership.publish(View(number=4, carries={0: [1]}))
    assert membership.worker.wait(0, after=0, position=0, timeout_s=0).number == 5
    assert membership.worker.wait(0, after=5, position=0, timeout_s=0) is None
    assert membership.worker.newer(4)
    assert not membership.worker.newer(5)


def test_a_view_that_does_not_concern_us_is_newer_but_not_waited_for(membership):
    membership.publish(View(number=1, carries={0: [0]}))
    membership.publish(View(number=2, carries={1: [0]}, leave=[3], loads=4))
    assert membership.worker.newer(1)
    assert membership.worker.wait(0, after=0, position=0, timeout_s=0) is None
    for seat in (1, 3, 4):
        assert membership.worker.wait(seat, after=1, position=0, timeout_s=0).number == 2


@pytest.mark.parametrize("asked", [{"stop": "interrupted"}, {"halt": "boundary"}, {"halt": "now"}])
def test_some_views_concern_everybody(membership, asked):
    membership.publish(View(number=1, **asked))
    assert membership.worker.wait(7, after=0, position=0, timeout_s=0) == View(number=1, **asked)


def test_a_waiting_worker_is_woken(membership):
    got = []
    waiting = threading.Thread(
        target=lambda: got.append(membership.worker.wait(0, after=1, position=0, timeout_s=TIMEOUT_S))
    )
    waiting.start()
    membership.publish(View(number=2, carries={0: [0]}))
    waiting.join(timeout=TIMEOUT_S)
    assert got[0].number == 2
