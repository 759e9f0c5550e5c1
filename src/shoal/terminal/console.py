"""The console of every verb: text of others reaches the terminal as text, never as a command to it.

A run's name, a worker's note, a model's error or a column of a file may contain anything. This is the only place that
removes what a terminal would act on, so no caller has to think of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

# C0 without tab and newline, DEL, C1, line separators, and the characters that change the direction of text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_SURROGATE = re.compile("[\ud800-\udfff]")  # cannot be encoded: printing one would raise


def printable(text: str) -> str:
    """The text without characters that a terminal acts on."""
    if text.isascii() and text.isprintable():
        return text
    return _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", _CONTROL.sub("", text))


def json_line(value: Any) -> str:
    """The value as one line of JSON. `json.dumps` escapes all control characters but DEL."""
    return json.dumps(value, default=str).replace("\x7f", "\\u007f")


class TextConsole(Console):
    """A console that prints text of others as it is: no markup, no emoji codes, no control characters."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if not segment.control and (text := printable(segment.text)) != segment.text:
                segment = Segment(text, segment.style)
            yield segment  # the console's own commands, such as cursor movements, are marked as control


def make_console(*, to_stderr: bool = False, file: IO[str] | None = None, width: int | None = None) -> TextConsole:
    return TextConsole(stderr=to_stderr, file=file, width=width, markup=False, emoji=False, highlight=False)
