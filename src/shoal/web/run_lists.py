"""The list of runs. Pages ask for it every few seconds, so an answer is kept until a row changes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field
from starlette.responses import Response

from shoal.spec.base import Spec
from shoal.web import answers
from shoal.web.run_filter import select_rows
from shoal.web.searches import IS_SEARCH
from shoal.web.table import Call, content_response, encode_answer

MAX_KEPT = 64
MAX_GROUPS = 200
LIVE = ("training", "starting", "search searching")


class ListQuery(Spec):
    where: str = Field("", max_length=500)
    sort: str = Field("-started_t", max_length=100)
    limit: int = Field(100, ge=1, le=1000)
    cursor: int = Field(0, ge=0)


class RunLists:
    """Answers that were made from the present rows, by question and by the runs that the identity may see."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: list[dict[str, Any]] = []
        self._kept: OrderedDict[tuple[Any, ...], bytes] = OrderedDict()

    def list_runs(self, call: Call) -> Response:
        return content_response(call.request, self.content(call))

    def content(self, call: Call) -> bytes:
        """The answer in JSON; the same bytes as before if nothing has changed."""
        query: ListQuery = call.query
        key = (call.identity.runs, query.where, query.sort, query.limit, query.cursor)
        rows = call.site.rows()
        with self._lock:
            if rows is not self._rows:
                self._rows = rows
                self._kept.clear()
            if key in self._kept:
                return self._kept[key]
        visible = [row for row in rows if call.identity.sees(row["run"])]
        content = encode_answer(_make_list(visible, query))
        with self._lock:
            if rows is self._rows:
                self._kept[key] = content
                if len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
        return content


def _make_list(visible: Sequence[Mapping[str, Any]], query: ListQuery) -> answers.RunList:
    found = select_rows(visible, where=query.where, sort=query.sort)
    after = query.cursor + query.limit
    rows = [
        answers.RunRow(**{name: row[name] for name in answers.RunRow.model_fields})
        for row in found[query.cursor : after]
    ]
    groups = _groups(found)
    return answers.RunList(
        rows=rows,
        groups=groups[:MAX_GROUPS],
        all_groups=len(groups),
        total=len(found),
        cursor=str(after) if after < len(found) else None,
    )


def _groups(rows: Sequence[Mapping[str, Any]]) -> list[answers.RunGroup]:
    """Jobs and searches, those with most runs first."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        is_search = row["status"].startswith(IS_SEARCH)
        found.setdefault(("search", row["run"]) if is_search else ("job", row["job"]), []).append(row)
    groups = [
        answers.RunGroup(
            kind=kind,
            job=name,
            runs=own[0].get("trials", 0) if kind == "search" else len(own),
            training=sum(row["status"] in LIVE for row in own),
            newest_t=max((row["started_t"] for row in own if row["started_t"] is not None), default=None),
        )
        for (kind, name), own in found.items()
    ]
    return sorted(groups, key=lambda group: -group.runs)
