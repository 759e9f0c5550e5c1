"""The documentation says what the code does: fields, events, receipt, errors, links."""

import json
import re

import pytest

from shoal import errors
from shoal.cli import app
from shoal.cli import search as cli_search
from shoal.events.run_state import _HANDLERS
from shoal.events.schema import KINDS
from shoal.events.schema_docs import render_table
from shoal.jobs.search.receipt import SearchReceipt
from shoal.spec.names import METRIC_ALIASES
from shoal.spec.receipt import Receipt
from tests.conftest import MLP
from tests.docs.job_file_tables import field_rows, heading, sections
from tests.docs.pages import PAGES, ROOT, anchors, links, table_under

DOCS = ROOT / "docs"


@pytest.mark.parametrize("section", sections(), ids=heading)
def test_every_field_stands_in_the_job_file_page(section):
    rows = table_under(DOCS / "job-file.md", heading(section))
    assert [row[:3] for row in rows] == field_rows(section)
    assert all(len(row) == 4 and row[3] for row in rows)


def test_the_table_of_events_is_made_from_the_schema():
    assert render_table() in (DOCS / "runs.md").read_text(), "python -m shoal.events.schema_docs"


def test_every_kind_in_the_stream_changes_the_state_of_a_run():
    assert set(_HANDLERS) == {kind.name for kind in KINDS.values() if kind.in_stream}


def test_every_kind_of_the_schema_is_emitted():
    """What is emitted is checked against the schema while tests run; this is the other direction."""
    source = "".join(file.read_text() for file in (ROOT / "src").rglob("*.py") if file.parent.name != "events")
    assert [name for name, kind in KINDS.items() if kind.in_stream and f'"{name}"' not in source] == []


def test_the_rows_of_a_real_run_fit_the_schema(run):
    outcome = run(MLP, steps=4, evaluate={"every_steps": 2}, checkpoint={"every": "1 step"}, export=["program"])
    rows = [json.loads(line) for line in outcome.paths.events.read_text().splitlines()]
    kinds = [row["kind"] for row in rows]
    assert {"run_started", "built", "step", "evaluated", "saved", "finished", "run_ended"} <= set(kinds)
    for row in rows:
        kind = KINDS[row["kind"]]
        assert kind.problems({k: v for k, v in row.items() if k not in ("t", "who", "kind", "step")}) == {}


def test_every_field_of_the_receipt_is_told():
    told = [name for row in table_under(DOCS / "runs.md", "Receipt") for name in re.findall(r"`(\w+)`", row[0])]
    assert told == sorted(told, key=told.index)
    assert set(told) == set(Receipt.model_fields)


def test_every_verb_is_told():
    told = [row[0].strip("`").split()[1] for row in table_under(DOCS / "runs.md", "Commands")]
    names = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert set(told) == names | {group.name for group in app.registered_groups}


def test_every_verb_of_searches_is_told():
    told = [row[0].strip("`").split()[2] for row in table_under(DOCS / "search.md", "The first search")]
    names = {command.name or command.callback.__name__ for command in cli_search.app.registered_commands}
    assert set(told) - {"JOB"} == names - {cli_search.START}


def test_every_field_of_the_receipt_of_a_search_is_told():
    told = [name for row in table_under(DOCS / "search.md", "The receipt") for name in re.findall(r"`(\w+)`", row[0])]
    assert set(told) == set(SearchReceipt.model_fields)


def test_every_short_name_of_a_metric_is_told():
    page = (DOCS / "training.md").read_text()
    assert [name for name in METRIC_ALIASES if f"`{name}`" not in page] == []


def test_the_page_of_errors_is_made_from_the_catalogue():
    assert (DOCS / "errors.md").read_text() == errors.render_docs(), "python -m shoal.errors > docs/errors.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_can_be_reached_from_the_readme():
    linked = {link.partition("#")[0] for link in links(ROOT / "README.md")}
    assert {str(page.relative_to(ROOT)) for page in PAGES} - linked == {"README.md"}


def test_the_fence_of_a_block_is_closed():
    for page in PAGES:
        assert page.read_text().count("```") % 2 == 0, page.name
