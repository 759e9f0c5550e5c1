"""A deleted run takes its tags and its number with it, and a plan to clean up survives runs that begin meanwhile."""

import json
import shutil

import pytest

from shoal.jobs import run_dir, run_index
from shoal.spec.run_paths import RunPaths
from shoal.storage import cleanup, tags, trash
from tests.jobs.past_run import write_run


@pytest.fixture
def runs(tmp_path):
    for n in (1, 2):
        write_run(tmp_path / f"mlp-{n}")
    return tmp_path


def test_tags_go_with_a_run_and_come_back(runs):
    tags.change_tags(runs, "mlp-2", add=["best", "v2"])
    tags.change_tags(runs, "mlp-1", add=["old"])
    trash.move_to_trash(RunPaths(runs / "mlp-2"), runs)
    assert tags.read_tags(runs) == {"mlp-1": ["old"]}
    trash.restore(runs, "mlp-2")
    assert tags.read_tags(runs) == {"mlp-1": ["old"], "mlp-2": ["best", "v2"]}


def test_checkpoints_that_go_leave_the_tags(runs):
    tags.change_tags(runs, "mlp-2", add=["best"])
    (runs / "mlp-2" / "checkpoints").mkdir()
    trash.move_to_trash(RunPaths(runs / "mlp-2"), runs, part="checkpoints")
    assert tags.read_tags(runs) == {"mlp-2": ["best"]}


def test_an_entry_without_tags_is_restored(runs):
    """As earlier versions wrote it."""
    entry = trash.move_to_trash(RunPaths(runs / "mlp-2"), runs)
    fields = {name: value for name, value in entry.fields.items() if name != "tags"}
    (entry.directory / trash.ENTRY_FILE).write_text(json.dumps(fields))
    trash.restore(runs, "mlp-2")
    assert (runs / "mlp-2" / "job.yaml").is_file()


def test_a_new_run_has_a_number_that_no_deleted_run_has(runs):
    trash.move_to_trash(RunPaths(runs / "mlp-2"), runs)
    assert run_dir.reserve("mlp", runs).name == "mlp-3"
    trash.restore(runs, "mlp-2")
    tags.change_tags(runs, "mlp-9", add=["best"])
    shutil.rmtree(runs / "mlp-2")  # by hand: its tags stay
    assert run_dir.reserve("mlp", runs).name == "mlp-10"


@pytest.mark.parametrize("damage", ["", "[]", '{"run": 7}', "[" * 100_000])
def test_a_damaged_entry_has_no_number(runs, damage):
    entry = runs / ".trash" / "20260101-000000-00000000"
    entry.mkdir(parents=True)
    (entry / trash.ENTRY_FILE).write_text(damage)
    (runs / tags.TAGS_FILE).write_text(damage)
    assert run_dir.reserve("mlp", runs).name == "mlp-3"


def test_runs_whose_names_have_no_number_are_jobs_of_their_own(runs):
    for name in ("first", "second", "third"):
        shutil.move(runs / "mlp-1", runs / name)
        write_run(runs / "mlp-1")
    items = cleanup.make_plan(runs, cleanup.CleanupRules(keep_newest=1))
    assert [item["run"] for item in items] == ["mlp-2"]  # mlp-1 has the newer job file


def test_a_run_that_begins_between_two_listings_stays(runs, monkeypatch):
    list_summaries = run_index.list_summaries

    def listed_then_begun(where):
        rows = list_summaries(where)
        write_run(runs / "new-1")
        return rows

    monkeypatch.setattr(run_index, "list_summaries", listed_then_begun)
    items = cleanup.make_plan(runs, cleanup.CleanupRules())
    assert sorted(item["run"] for item in items) == ["mlp-1", "mlp-2"]
