"""A thread that plays the driver: it welcomes who calls, keeps what they say, and tells newcomers the newest view."""

import contextlib
import select
import threading

from shoal.fleet.contact import Contact
from shoal.fleet.control import Control
from shoal.wire.bell import Bell

LONG_S = 30  # a test that waits so long has failed


class Driver:
    def __init__(self, token, *, port=0, welcomes=True):
        self.control = Control(token, port=port)
        self.contact = Contact(self.control.host, self.control.port, token)
        self.callers = []
        self.said = []
        self.view = None
        self._welcomes = welcomes
        self._changed = threading.Condition()
        self._leave = Bell()
        self._thread = threading.Thread(target=self._drive)
        self._thread.start()

    def _drive(self):
        while self._leave not in select.select([self.control, self._leave], [], [])[0]:
            for said in self.control.take():
                if said.kind == "here" and self._welcomes:
                    self.control.send(said.caller, "welcome", caller=said.caller)
                    if self.view is not None:
                        self.control.publish(self.view, [said.caller])
                with self._changed:
                    self.said.append(said)
                    if said.kind == "here":
                        self.callers.append(said.caller)
                    self._changed.notify_all()

    def publish(self, view):
        self.view = view
        self.control.publish(view, self.callers)

    def heard(self, kind, count=1):
        """The first so many of a kind; waits for them."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._of(kind)) >= count, LONG_S), self.said[-5:]
            return self._of(kind)[:count]

    def _of(self, kind):
        return [said for said in self.said if said.kind == kind]

    def close(self):
        self._leave.ring()
        self._thread.join()
        self.control.close()
        self._leave.close()


@contextlib.contextmanager
def driver(token, **settings):
    with contextlib.closing(Driver(token, **settings)) as made:
        yield made
