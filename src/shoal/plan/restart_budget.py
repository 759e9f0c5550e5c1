"""What to do when nobody is left who holds the state: a pure function, so that it can be read as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RestartDecision:
    action: Literal["restart", "give up"]
    why: str


def decide_restart(*, restarts_left: int, ready: bool) -> RestartDecision:
    """`ready`: the worker that died had come so far that it could train; one that never does is broken."""
    if restarts_left > 0:
        return RestartDecision("restart", "from the newest checkpoint" if ready else "once more")
    return RestartDecision("give up", "no restarts left" + ("" if ready else ", and it died before it could train"))
