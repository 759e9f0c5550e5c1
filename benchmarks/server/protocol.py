"""The process of a side: reports that it is ready, then reads the number of rounds line by line, until 0."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable


def serve(make_rounds: Callable[[int], list[float]]) -> None:
    """`make_rounds(n)` returns how many seconds each round took."""
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output must not look like an answer
    make_rounds(3)  # warm up memory pages and connections
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
