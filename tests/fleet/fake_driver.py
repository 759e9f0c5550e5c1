"""A thread that plays the driver: it welcomes who calls, keeps what they say, and tells newcomers the newest view."""

import contextlib
import select
import threading

from shoal.fleet.control_server import ControlServer
from shoal.fleet.driver_address import DriverAddress
from shoal.net.wakeup import Wakeup

TIMEOUT_S = 30  # a test that waits so long has failed


class FakeDriver:
    def __init__(self, token, *, port=0, welcomes=True):
        self.control = ControlServer(token, port=port)
        self.contact = DriverAddress(self.control.host, self.control.port, token)
        self.callers = []
        self.received = []
        self.view = None
        self._welcomes = welcomes
        self._changed = threading.Condition()
        self._stop = Wakeup()
        self._thread = threading.Thread(target=self._drive)
        self._thread.start()

    def _drive(self):
        while self._stop not in select.select([self.control, self._stop], [], [])[0]:
            for said in self.control.receive():
                if said.kind == "here" and self._welcomes:
                    self.control.send(said.connection, "welcome", caller=said.connection)
                    if self.view is not None:
                        self.control.publish_view(self.view, [said.connection])
                with self._changed:
                    self.received.append(said)
                    if said.kind == "here":
                        self.callers.append(said.connection)
                    self._changed.notify_all()

    def publish(self, view):
        self.view = view
        self.control.publish_view(view, self.callers)

    def wait_for(self, kind, count=1):
        """The first so many of a kind; waits for them."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._of(kind)) >= count, TIMEOUT_S), self.received[-5:]
            return self._of(kind)[:count]

    def _of(self, kind):
        return [said for said in self.received if said.kind == kind]

    def close(self):
        self._stop.notify()
        self._thread.join()
        self.control.close()
        self._stop.close()


@contextlib.contextmanager
def fake_driver(token, **settings):
    with contextlib.closing(FakeDriver(token, **settings)) as made:
        yield made
