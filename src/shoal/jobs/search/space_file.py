"""The search of a job that has none: from a file, or from Python."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import error
from shoal.spec.job import Job
from shoal.spec.load import load_job
from shoal.spec.yaml_document import read_document


def search_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `search`: `data` has a field `search`, or those fields, or is the space itself."""
    if not isinstance(data, Mapping):
        raise error("SH105", f"expected a section, found {type(data).__name__}", where="space")
    if isinstance(data.get("search"), dict):
        return dict(data["search"])
    return dict(data) if isinstance(data.get("space"), dict) else {"space": dict(data)}


def load_search_job(path: Path, *, space: Path | None, overrides: Sequence[str]) -> Job:
    """The job of a search. `space` is a YAML file that replaces the job's `search`."""
    if space is None:
        return load_job(path, overrides=overrides)
    fields = search_fields(read_document(space).data)
    return load_job(path, overrides=[f"search={json.dumps(fields)}", *overrides])
