"""Tags of runs: words that a user gives them. One file beside the runs holds all; runs with tags are never cleaned."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError, error
from shoal.events.checks import make_check
from shoal.spec.private_file import open_lock_file
from shoal.spec.run_paths import write_atomically
from shoal.storage.locks import locked

TAGS_FILE = ".tags.json"
MAX_TAGS = 20
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
_is_tags: Callable[[Any], bool] = make_check(dict[str, list[str]])


def read_tags(runs: Path) -> dict[str, list[str]]:
    """Tags by run, to show them. A damaged file has none."""
    try:
        return require_tags(runs)
    except ShoalError:
        return {}


def require_tags(runs: Path) -> dict[str, list[str]]:
    """Tags by run, for whoever deletes or changes. SH672 if the file is damaged: nobody knows what it protected."""
    file = runs / TAGS_FILE
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        found = None
    if not _is_tags(found):
        fix = "Mend or delete it: then runs that had tags may be cleaned."
        raise error("SH672", "the file of tags is damaged", where=str(file), fix=fix)
    return dict(found)


def change_tags(runs: Path, run: str, *, add: Iterable[str] = (), remove: Iterable[str] = ()) -> list[str]:
    """Change the tags of a run, and return them. SH672 if a word cannot be a tag."""
    wanted, unwanted = list(add), set(remove)
    for tag in wanted:
        if not _TAG.fullmatch(tag):
            raise error("SH672", f"'{tag}' cannot be a tag", where=run)
    with locked(open_lock_file(runs / ".tags.lock")):
        every = require_tags(runs)
        tags = [tag for tag in dict.fromkeys([*every.get(run, []), *wanted]) if tag not in unwanted]
        if len(tags) > MAX_TAGS:
            raise error("SH672", f"'{run}' would have {len(tags)} tags", where=run, fix=f"Keep to {MAX_TAGS}.")
        every[run] = tags
        write_atomically(runs / TAGS_FILE, json.dumps({name: one for name, one in every.items() if one}, indent=1))
    return tags
