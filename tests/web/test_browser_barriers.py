"""No page has a barrier that axe calls serious: every address and part, wide and narrow, light and dark, login, an open
question, the help about keys, and a run that trains."""

import sys
from pathlib import Path

import pytest

from tests.web.browser import Page, chromium
from tests.web.live_run import serving, training
from tests.web.test_browser import ADDRESSES, TABS

AXE = Path(sys.prefix) / "axe.min.js"
RUN_AXE = "axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'best-practice']})"
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 360, "height": 740}
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not chromium(), reason="there is no Chromium"),
    pytest.mark.skipif(not AXE.is_file(), reason="there is no axe-core"),
]


def barriers(page):
    """What axe finds on the page as it is now: rule and places."""
    page.evaluate(AXE.read_text())
    return {
        one["id"]: [node["html"][:200] for node in one["nodes"][:3]]
        for one in page.evaluate(RUN_AXE)["violations"]
        if one["impact"] in ("serious", "critical")
    }


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_no_page_has_a_serious_barrier(browser, past, scheme, size):
    page = Page(browser, viewport=size, color_scheme=scheme).log_in(past)
    found = {}
    for address in [*ADDRESSES, *(f"#/run/mlp-1?tab={tab.lower()}" for tab in TABS)]:
        page.goto(f"{past.url}/{address}")
        page.locator("h1").first.wait_for()
        page.locator("#part > *" if "run/" in address else "main table, main .empty").first.wait_for()
        found[address] = barriers(page)
    assert {address: one for address, one in found.items() if one} == {}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_login_help_and_questions_have_no_serious_barrier(browser, past, scheme, size):
    options = {"viewport": size, "color_scheme": scheme}
    found = {}
    stranger = Page(browser, **options).page
    stranger.goto(past.url)
    stranger.get_by_label("Token or code").fill("wrong")
    stranger.get_by_role("button", name="Open").click()
    stranger.get_by_role("alert").wait_for()
    found["login"] = barriers(stranger)
    page = Page(browser, **options).log_in(past)
    page.get_by_role("button", name="Keyboard help").click()
    page.locator("aside.help").wait_for()
    found["help"] = barriers(page)
    page.get_by_role("button", name="Keyboard help").click()  # on a phone it lies over the buttons
    page.goto(f"{past.url}/#/run/mlp-2")
    page.get_by_role("button", name="Delete").click()
    page.locator("dialog[open]").wait_for()
    found["question"] = barriers(page)
    assert {where: one for where, one in found.items() if one} == {}


def test_the_workers_of_a_live_run_have_no_serious_barrier(browser, tmp_path):
    """With lanes, meters of memory, servers, buttons, and stacks that were asked for."""
    sync = {"kind": "server", "servers": 2}
    with training(tmp_path / "job", tmp_path / "runs", sync=sync), serving(tmp_path / "runs") as server:
        found = {}
        for size in (WIDE, NARROW):
            page = Page(browser, viewport=size).log_in(server)
            page.goto(f"{server.url}/#/run/digits-1?tab=workers")
            page.locator("meter").first.wait_for()
            page.get_by_role("button", name="Scale servers").wait_for()
            page.get_by_role("button", name="Where is every thread now?").click()
            page.locator("pre.log").first.wait_for()
            found[size["width"]] = barriers(page)
            assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        assert {width: one for width, one in found.items() if one} == {}
