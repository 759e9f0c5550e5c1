"""The hooks of pytest that write docs/compatibility.md: with `--compatibility-table FILE`, of the rows that passed."""

from pathlib import Path

import pytest

from tests.compat.rows import MARKERS, Row, page, section_of

PROPERTY = "compatibility"
"""The rows of a test travel with its report: xdist's workers collect, and the main process writes."""


def pytest_addoption(parser):
    parser.addoption("--compatibility-table", metavar="FILE", help="write docs/compatibility.md of what passed")


def pytest_configure(config):
    target = config.getoption("--compatibility-table")
    if target and not hasattr(config, "workerinput"):
        config.pluginmanager.register(CompatibilityTable(Path(target)))


def pytest_collection_modifyitems(items):
    for item in items:
        marks = [mark for name in MARKERS for mark in item.iter_markers(name) if mark.args]
        section = section_of(item.path.read_text()) if marks else ""
        for mark in marks:
            row = Row.declare(section, *mark.args, **mark.kwargs)
            item.user_properties.append((PROPERTY, [row.section, row.thing, row.result, row.how]))


class CompatibilityTable:
    """A row is written if at least one of its tests passed, and none failed or was skipped."""

    def __init__(self, target):
        self.target = target
        self.passed, self.spoiled = set(), set()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        rows = [Row(*value) for name, value in report.user_properties if name == PROPERTY]
        if report.failed or report.skipped:
            self.spoiled.update(rows)
        elif report.when == "call":
            self.passed.update(rows)

    def pytest_sessionfinish(self):
        self.target.write_text(page(sorted(self.passed - self.spoiled)))
