"""One contract, every body."""

import threading

import pytest

from shoal.fleet.membership import FileMembership, MemoryMembership
from shoal.spec.view import View


@pytest.fixture(params=["memory", "file"])
def pair(request, tmp_path):
    """The driver's end and a worker's end."""
    if request.param == "memory":
        both = MemoryMembership()
        return both, both
    return FileMembership(tmp_path / "view.json"), FileMembership(tmp_path / "view.json")


def test_a_worker_gets_the_view_that_has_it(pair):
    driver, worker = pair
    driver.publish(View(number=1, carries={1: [0]}))
    assert worker.wait(0, after=0, step=0, timeout_s=0) is None
    driver.publish(View(number=2, carries={0: [0, 1]}))
    assert worker.wait(0, after=0, step=0, timeout_s=0).carries == {0: [0, 1]}


def test_only_newer_views_count(pair):
    driver, worker = pair
    driver.publish(View(number=5, carries={0: [0]}))
    driver.publish(View(number=4, carries={0: [1]}))
    assert worker.wait(0, after=0, step=0, timeout_s=0).number == 5
    assert worker.wait(0, after=5, step=0, timeout_s=0) is None
    assert worker.newer(4)
    assert not worker.newer(5)


def test_stop_reaches_everybody(pair):
    driver, worker = pair
    driver.publish(View(number=1, stop="interrupted"))
    assert worker.wait(7, after=0, step=0, timeout_s=0).stop == "interrupted"


def test_a_waiting_worker_is_woken(pair):
    driver, worker = pair
    got = []
    waiting = threading.Thread(target=lambda: got.append(worker.wait(0, after=1, step=0, timeout_s=30)))
    waiting.start()
    driver.publish(View(number=2, carries={0: [0]}))
    waiting.join(timeout=30)
    assert got[0].number == 2
