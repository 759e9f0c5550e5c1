"""The order of tests that fork this process."""

from pathlib import Path


def pytest_collection_modifyitems(items):
    """Clusters fork the process of the test, and a forked process must not inherit locks that threads of other tests
    hold: these tests come first."""
    items.sort(key=lambda item: Path(__file__).parent not in item.path.parents)
