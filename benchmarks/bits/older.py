"""Job files for commits that had other names for some fields."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from shoal.spec.migrate import RENAMED_FIELDS


def in_words_of(source: Path, job: dict[str, Any]) -> dict[str, Any]:
    """The job as the code in that directory wants it written."""
    if (source / "src/shoal/spec/migrate.py").is_file():
        return job
    older = copy.deepcopy(job)
    for old, new in RENAMED_FIELDS.items():
        _rename(older, new.split("."), old.split("."))
    return older


def _rename(job: dict[str, Any], today: list[str], before: list[str]) -> None:
    section = job if len(today) == 1 else job.get(today[0])
    if not isinstance(section, dict) or today[-1] not in section:
        return
    target = job if len(before) == 1 else job.setdefault(before[0], {})
    target[before[-1]] = section.pop(today[-1])
    if section is not job and not section:
        del job[today[0]]
