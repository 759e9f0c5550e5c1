"""Work in steps: results, errors and waiting, without a process."""

import contextlib
import os
import select
import threading

import pytest

from shoal.jobs.coroutines import BackgroundCall, in_thread, run_steps

PATIENCE_S = 30


def counted(steps):
    """How often it yields, and its result."""
    count = 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return count, end.value
        count += 1


def test_steps_are_run_to_their_result():
    def steps():
        for _ in range(3):
            yield ()
        return "done"

    assert run_steps(steps()) == "done"


def test_what_steps_raise_is_raised():
    def steps():
        yield ()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_steps(steps())


def test_steps_wait_for_their_descriptors():
    ours, theirs = os.pipe()

    def steps():
        yield [ours]
        return os.read(ours, 10)

    with contextlib.ExitStack() as stack:
        stack.callback(os.close, ours)
        stack.callback(os.close, theirs)
        os.write(theirs, b"ready")
        assert run_steps(steps()) == b"ready"


def test_a_call_in_a_thread_does_not_hold_up_the_others():
    may_go = threading.Event()
    steps = in_thread(lambda: may_go.wait(PATIENCE_S) and threading.current_thread().name)
    for _ in range(3):
        (fileno,) = next(steps)
    assert select.select([fileno], [], [], 0)[0] == []
    may_go.set()
    assert select.select([fileno], [], [], PATIENCE_S)[0] == [fileno]
    assert counted(steps) == (0, "shoal-background")


def test_what_a_call_in_a_thread_raises_is_raised_by_its_result():
    def fail():
        raise ZeroDivisionError("in the thread")

    call = BackgroundCall(fail)
    with pytest.raises(ZeroDivisionError, match="in the thread"):
        call.result()
    assert call.done
