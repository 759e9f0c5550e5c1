"""The other end of a side: says that it is ready, then makes as many rounds as each line says, until one says none."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable


def serve(make_rounds: Callable[[int], list[float]]) -> None:
    """`make_rounds(n)` returns how many seconds each round took."""
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed must not look like an answer
    make_rounds(3)  # pages that are touched for the first time, connections that find their speed
    _reply(said, [])
    for line in sys.stdin:
        if not int(line):
            return
        _reply(said, make_rounds(int(line)))


def timed(rounds: int, act: Callable[[], object]) -> list[float]:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return times


def _reply(said: object, times: list[float]) -> None:
    print(json.dumps(times), file=said, flush=True)  # type: ignore[call-overload]
