"""A live run with parameter servers, and one that finishes while it is looked at: their buttons, in a real browser."""

import os
import re
import signal

import pytest

from shoal.events.packed_file import packed_path
from shoal.storage.tags import read_tags
from tests.web.browser import Page, chromium
from tests.web.live_run import serving, state_of, training, wait_until
from tests.web.test_browser_actions import DESK, press

pytestmark = [pytest.mark.browser, pytest.mark.skipif(not chromium(), reason="there is no Chromium")]


def servers_of(paths):
    return [one for one in state_of(paths).servers.values() if one.state == "serving"]


def test_servers_are_scaled_killed_and_drained(browser, tmp_path):
    sync = {"kind": "server", "servers": 2}
    with training(tmp_path / "job", tmp_path / "runs", sync=sync) as paths, serving(tmp_path / "runs") as server:
        one = Page(browser, **DESK)
        page = one.log_in(server)
        page.goto(f"{server.url}/#/run/digits-1?tab=workers")
        press(page, "Scale servers", typed="3")
        wait_until(lambda: len(servers_of(paths)) == 3)
        page.locator("tr", has_text="server-").nth(2).locator(".status", has_text="serving").wait_for()

        os.kill(servers_of(paths)[-1].pid, signal.SIGKILL)
        page.locator("td .status", has_text="dead").wait_for()
        wait_until(lambda: len(servers_of(paths)) == 3)

        leaves = servers_of(paths)[0].name
        row = page.locator("tr", has=page.get_by_role("link", name=leaves, exact=True))
        row.get_by_role("button", name="Drain").click()
        page.locator("dialog").get_by_role("button", name="Drain").click()
        page.locator("dialog").wait_for(state="detached")
        row.locator(".status", has_text="left").wait_for()
        assert row.get_by_role("button", name="Drain").count() == 0
        wait_until(lambda: len(servers_of(paths)) == 2)
        step = state_of(paths).step
        wait_until(lambda: state_of(paths).step > step)  # nobody waits for all that
        assert one.failures == []


def test_a_run_that_has_just_finished_is_tagged_packed_downloaded_and_deleted(browser, tmp_path):
    runs = tmp_path / "runs"
    with training(tmp_path / "job", runs, epochs=20) as paths, serving(runs) as server:
        one = Page(browser, **DESK)
        page = one.log_in(server)
        page.goto(f"{server.url}/#/run/digits-1")
        page.locator(".bar .status", has_text="finished").wait_for()  # without a reload
        press(page, "Tag", confirm="Save", typed="best")
        page.locator(".tag", has_text="best").wait_for()
        press(page, "Compact")
        page.get_by_role("button", name="Expand").wait_for()
        assert packed_path(paths.events).exists()
        with page.expect_download() as download:
            page.get_by_role("link", name="Model").click()
        weights = (paths.model / "model.safetensors").read_bytes()
        with open(download.value.path(), "rb") as file:
            assert file.read() == weights
        page.get_by_role("button", name="Delete").click()
        page.get_by_label("Type digits-1 to confirm").fill("digits-1")
        page.get_by_role("button", name="Move to the trash").click()
        page.get_by_role("button", name="Restore").wait_for()
        assert read_tags(runs) == {}
        press(page, "Restore")
        page.get_by_text("digits-1 is back").wait_for()
        page.goto(f"{server.url}/#/runs")
        page.locator(".tag", has_text="best").wait_for()
        assert one.failures == []


def test_a_page_that_comes_back_asks_for_the_curves_again(browser, tmp_path):
    """What came while it was hidden is not replayed: it goes on from where the run is then."""
    with training(tmp_path / "job", tmp_path / "runs") as paths, serving(tmp_path / "runs") as server:
        one = Page(browser, **DESK)
        page = one.log_in(server)
        page.goto(f"{server.url}/#/run/digits-1")
        page.locator(".u-over").first.wait_for()
        hide = """(hidden) => {
            Object.defineProperty(document, "hidden", { get: () => hidden, configurable: true });
            document.dispatchEvent(new Event("visibilitychange"));
        }"""
        page.evaluate(hide, True)
        step, size = state_of(paths).step, paths.events.stat().st_size
        wait_until(lambda: state_of(paths).step > step + 100)
        one.asked.clear()
        page.evaluate(hide, False)
        page.wait_for_function(
            "(step) => [...document.querySelectorAll('.plot')].some((one) => Number(/at step (\\d+)/.exec("
            "one.getAttribute('aria-label'))?.[1]) > step)",
            arg=step + 100,
        )
        streams = [address for address in one.asked if "/stream?" in address]
        after = [int(re.search(r"after=(\d+)", address)[1]) for address in streams]
        assert len(after) == 1
        assert after[0] > size
        assert any("/series?" in address for address in one.asked)
        assert one.failures == []
