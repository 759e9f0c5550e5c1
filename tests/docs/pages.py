"""The pages of the documentation, and the blocks in them that can be run."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])

_BLOCK = re.compile(r"((?:<!-- .+? -->\n)*)```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_TABLE_ROW = re.compile(r"^\| (`.+) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block. Marks are the HTML comments right above it: `run`, `tour`, `file: name`."""

    language: str
    text: str
    marks: tuple[str, ...]

    @property
    def is_executed(self) -> bool:
        return "run" in self.marks

    @property
    def file(self) -> str:
        return next((mark.removeprefix("file: ") for mark in self.marks if mark.startswith("file: ")), "")


def blocks(page: Path) -> list[Block]:
    found = _BLOCK.findall(page.read_text())
    return [Block(language, text, tuple(re.findall(r"<!-- (.+?) -->", marks))) for marks, language, text in found]


def links(page: Path) -> list[str]:
    """What a page links to, without the web."""
    return [link for link in _LINK.findall(_prose(page)) if "://" not in link]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of the headings."""
    headings = _HEADING.findall(_prose(page))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def table_under(page: Path, heading: str) -> list[list[str]]:
    """The cells of the rows, up to the next heading, that begin with a name in code style."""
    pattern = rf"^#+ {re.escape(heading)}$(.*?)(?=^#|\Z)"
    section = re.search(pattern, _prose(page), re.MULTILINE | re.DOTALL)
    assert section, f"{page.name} has no heading '{heading}'"
    return [row.split(" | ") for row in _TABLE_ROW.findall(section[1])]


def _prose(page: Path) -> str:
    return _BLOCK.sub("", page.read_text())
