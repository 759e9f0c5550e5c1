"""The documentation has a picture of every page and of every part of a run."""

import re

from tools.web_screenshots import DOCS, PAGES

from shoal.web.app import STATIC


def test_every_page_and_part_has_a_picture():
    pages = re.search(r"const PAGES = \{(.*?)\}", (STATIC / "main.js").read_text())[1]
    names = re.findall(r"(\w+):", pages)
    shown = [re.match(r"#/(\w+)", address)[1] for address in PAGES.values()]
    assert len(names) > 5
    assert set(names) == set(shown)
    parts = re.findall(r'\["(\w+)",', re.search(r"const TABS = \[(.*?)\];", (STATIC / "run.js").read_text())[1])
    runs = [address for address in PAGES.values() if address.startswith("#/run/")]
    taken = {found[1] if (found := re.search(r"tab=(\w+)", address)) else parts[0] for address in runs}
    assert taken == set(parts)


def test_every_picture_is_in_the_documentation():
    text = (DOCS / "web.md").read_text()
    assert [name for name in PAGES if not (DOCS / f"{name}.png").is_file() or f"({name}.png)" not in text] == []
