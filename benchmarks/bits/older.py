"""Job files for commits that had other names for some fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def in_words_of(source: Path, job: dict[str, Any]) -> dict[str, Any]:
    """The job as the code in that directory wants it written."""
    return job
