"""Watchers that make a run last long enough for something to happen to it."""

import time
from pathlib import Path


class Dawdle:
    """Every step takes this much longer, until a file is there."""

    def __init__(self, seconds, until=""):
        self.seconds = seconds
        self.until = Path(until or "/nowhere/at-all")

    def watch(self, event):
        if event.kind == "step" and not self.until.exists():
            time.sleep(self.seconds)
