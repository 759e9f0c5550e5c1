"""The glossary: every word once, in order, with a file that exists; found from the README and CONTRIBUTING."""

import re

from tests.docs.pages import ROOT, links

GLOSSARY = ROOT / "docs" / "glossary.md"
ROW = re.compile(r"^\| ([a-z][a-z ]*) \| (.+) \| `([\w/]+\.py)` \|$", re.MULTILINE)
KEY_WORDS = {
    *("agent", "bucket", "chunk", "codec", "commit", "driver", "engine", "fragment", "job", "lane", "rank", "receipt"),
    *("replica", "residual", "run", "seat", "server", "shard", "strategy", "table", "view", "worker"),
}


def _rows():
    return ROW.findall(GLOSSARY.read_text())


def test_every_row_of_the_table_is_a_word_a_meaning_and_a_file():
    lines = [line for line in GLOSSARY.read_text().splitlines() if line.startswith("|")]
    assert len(_rows()) == len(lines) - 2  # head and rule


def test_every_word_is_listed_once_in_alphabetical_order():
    words = [word for word, _, _ in _rows()]
    assert words == sorted(set(words))
    assert set(words) >= KEY_WORDS


def test_every_file_exists():
    assert [file for _, _, file in _rows() if not (ROOT / "src" / "shoal" / file).is_file()] == []


def test_the_glossary_is_linked_from_the_readme_and_contributing():
    assert "docs/glossary.md" in links(ROOT / "README.md")
    assert "docs/glossary.md" in links(ROOT / "CONTRIBUTING.md")
