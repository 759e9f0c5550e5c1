"""A real browser for tests and screenshots: Chromium, driven by Playwright."""

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
PATIENCE_MS = 120_000


def chromium() -> str | None:
    """The path of the browser, or None."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextlib.contextmanager
def open_browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


class Page:
    """A page with what went wrong in it, and every address that it asked."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.failures: list[str] = []
        self.asked: list[str] = []
        self.page.on("pageerror", lambda failure: self.failures.append(str(failure)))
        self.page.on("console", self._note_error)
        self.page.on("request", lambda request: self.asked.append(request.url))

    def _note_error(self, message: Any) -> None:
        if message.type == "error":
            self.failures.append(message.text)

    def log_in(self, server: Any, *, token: str = "") -> Any:
        """Until the list is there: a page that goes elsewhere before would lose the link's code."""
        self.page.goto(f"{server.url}/#token={token}" if token else server.link())
        try:
            self.page.locator("table.runs a").first.wait_for()
        except Exception as failure:
            shown = self.page.locator("body").inner_text()
            told = f"{self.failures}, {self.asked[-5:]}, {shown[:500]}"
            raise AssertionError(f"the list does not come: {told}") from failure
        return self.page
