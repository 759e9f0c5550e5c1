"""A run that goes on in another thread while a test does something to it."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

PATIENCE_S = 600  # of a busy machine; nothing is decided by it


class BackgroundRun:
    """`outcome` is a future; `run_state` and `paths` are there once something happened."""

    def __init__(self):
        self.paths = self.state = self.outcome = None
        self.events = []
        self._changed = threading.Condition()

    def on_event(self, paths, event, run_state):
        with self._changed:
            self.paths, self.state = paths, run_state
            self.events.append(event)
            self._changed.notify_all()

    def wait_until(self, predicate):
        """Waits until it holds for the run_state."""
        with self._changed:
            seen = self._changed.wait_for(
                lambda: self.outcome.done() or (self.state is not None and predicate(self.state)), PATIENCE_S
            )
            assert seen, self.state
            assert predicate(self.state), self.outcome.result()

    def wait_for_workers(self, count):
        self.wait_until(lambda run_state: len(run_state.training_workers) == count)

    @property
    def address(self):
        return next(event["listens"] for event in self.events if event.kind == "run_started")


@contextlib.contextmanager
def background_run(run, job, **changes):
    one = BackgroundRun()
    with ThreadPoolExecutor(1) as pool:
        one.outcome = pool.submit(run, job, look=one.on_event, **changes)
        yield one
        one.outcome.result(PATIENCE_S)
