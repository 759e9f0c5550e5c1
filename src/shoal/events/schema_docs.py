"""`python -m shoal.events.schema_docs` prints the table of events for docs/runs.md."""

from __future__ import annotations

from typing import Any

from shoal.events.event import EventKind, type_name
from shoal.events.schema import KINDS


def render_table() -> str:
    """One row for each kind that occurs in a run's stream."""
    rows = [_row(kind) for kind in KINDS.values() if kind.in_stream]
    return "\n".join(["| kind | fields | when |", "|---|---|---|", *rows]) + "\n"


def _row(kind: EventKind) -> str:
    names = ", ".join(f"`{name}` {type_name(name, hint)}" for name, hint in kind.hints.items())
    docs = [f"`{name}`: {_field_doc(hint)}" for name, hint in kind.hints.items() if _field_doc(hint)]
    when = " ".join((kind.fields_class.__doc__ or "").split())
    return f"| `{kind.name}` | {names or '–'} | {when}{' ' + '; '.join(docs) + '.' if docs else ''} |"


def _field_doc(hint: Any) -> str:
    return next((one for one in getattr(hint, "__metadata__", ()) if isinstance(one, str)), "")


if __name__ == "__main__":
    print(render_table(), end="")
