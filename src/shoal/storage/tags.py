"""Tags of runs: words that a user gives them. One file beside the runs holds all; runs with tags are never cleaned."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from shoal.errors import error
from shoal.events.checks import make_check
from shoal.spec.private_file import open_lock_file
from shoal.spec.run_paths import write_atomically
from shoal.storage.locks import locked

TAGS_FILE = ".tags.json"
MAX_TAGS = 20
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
_is_tags: Callable[[Any], bool] = make_check(dict[str, list[str]])


def read_tags(runs: Path) -> dict[str, list[str]]:
    """Tags by run. A damaged file has none."""
    try:
        found = json.loads((runs / TAGS_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if _is_tags(found) else {}


def change_tags(runs: Path, run: str, *, add: Iterable[str] = (), remove: Iterable[str] = ()) -> list[str]:
    """Change the tags of a run, and return them. SH672 if a word cannot be a tag."""
    wanted, unwanted = list(add), set(remove)
    for tag in wanted:
        if not _TAG.fullmatch(tag):
            raise error("SH672", f"'{tag}' cannot be a tag", where=run)
    with locked(open_lock_file(runs / ".tags.lock")):
        every = read_tags(runs)
        tags = [tag for tag in dict.fromkeys([*every.get(run, []), *wanted]) if tag not in unwanted]
        if len(tags) > MAX_TAGS:
            raise error("SH672", f"'{run}' would have {len(tags)} tags", where=run, fix=f"Keep to {MAX_TAGS}.")
        every[run] = tags
        write_atomically(runs / TAGS_FILE, json.dumps({name: one for name, one in every.items() if one}, indent=1))
    return tags
