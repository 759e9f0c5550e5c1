"""The summary of a short stream without its snapshot. Most rows are of steps, and only the last of them matter."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from shoal.events.packed_file import open_content
from shoal.events.run_state import RunState
from shoal.events.snapshot import MIN_NEW_BYTES, RunSummary
from shoal.events.stream import parse_event

_COUNT = rb"(?:0|[1-9]\d{0,17})"
_NUMBER = rb"-?(?:0|[1-9]\d{0,14})(?:\.\d{1,20})?(?:e[-+]?\d{1,2})?"
_SOUND_STEP = re.compile(
    rb'\{"t":(?:0|[1-9]\d{0,9})(?:\.\d{1,6})?,"who":"(worker-\d{1,9})","kind":"step","step":' + _COUNT
    + rb'(?:,"(?:steps|samples|bytes_sent|bytes_plain)":' + _COUNT
    + rb'|,"(?:loss|lr|wall_s|data_s|compute_s|exchange_s|waiting_s|saving_s)":' + _NUMBER + rb")*\}"
)  # fmt: skip
"""A row of a step as workers write it. Whatever matches fits the schema; other rows are parsed and checked."""


def quick_summary(events: Path) -> RunSummary | None:
    """What folding all events gives; None if the stream is long: a snapshot then spares the next reader more."""
    with open_content(events) as file:
        content = file.read(MIN_NEW_BYTES + 1)
    return summarise_rows(content) if len(content) <= MIN_NEW_BYTES else None


def summarise_rows(content: bytes) -> RunSummary:
    """Of steps that follow each other, the last row of each worker is folded: the summary has no other traces of
    steps."""
    state = RunState()
    last: dict[bytes, bytes] = {}
    for line in content.split(b"\n")[:-1]:
        found = _SOUND_STEP.fullmatch(line) if state.started_t is not None else None
        if found:
            last.pop(found[1], None)  # those that are folded keep their order
            last[found[1]] = line
            continue
        _fold(state, last.values())
        last.clear()
        if line:
            _fold(state, (line,))
    _fold(state, last.values())
    return RunSummary.of(state)


def _fold(state: RunState, lines: Iterable[bytes]) -> None:
    for line in lines:
        event = parse_event(line)
        if event is None:
            state.skipped_rows += 1
        else:
            state.apply(event)
