"""A run that goes on in another thread while a test does something to it."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

PATIENCE_S = 150


class Driven:
    """`outcome` is a future; `picture` and `paths` are there once something happened."""

    def __init__(self):
        self.paths = self.picture = self.outcome = None
        self.events = []
        self._changed = threading.Condition()

    def look(self, paths, event, picture):
        with self._changed:
            self.paths, self.picture = paths, picture
            self.events.append(event)
            self._changed.notify_all()

    def until(self, holds):
        """Waits until it holds for the picture."""
        with self._changed:
            seen = self._changed.wait_for(
                lambda: self.outcome.done() or (self.picture is not None and holds(self.picture)), PATIENCE_S
            )
            assert seen, self.picture
            assert holds(self.picture), self.outcome.result()

    def trains(self, number):
        self.until(lambda picture: len(picture.training) == number)

    @property
    def address(self):
        return next(event["listens"] for event in self.events if event.kind == "run_started")


@contextlib.contextmanager
def driven(run, job, **changes):
    one = Driven()
    with ThreadPoolExecutor(1) as pool:
        one.outcome = pool.submit(run, job, look=one.look, **changes)
        yield one
        one.outcome.result(PATIENCE_S)
