"""What to do when a worker is gone: a pure function, so that it can be read as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Recovery:
    action: Literal["restart", "give up"]
    why: str


def decide(*, told: bool, restarts_left: int, progressed: bool) -> Recovery:
    """`told`: the worker said itself why it failed (the user's error would only come again).

    `progressed`: it committed a step since it was started; a worker that dies at once again and again is broken.
    """
    if told:
        return Recovery("give up", "the worker told its error")
    if restarts_left <= 0 and not progressed:
        return Recovery("give up", "no restarts left and no step was made since the last start")
    if restarts_left <= 0:
        return Recovery("give up", "no restarts left")
    return Recovery("restart", "it goes on from the newest checkpoint")
