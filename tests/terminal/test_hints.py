"""What is said before a run begins, and when nothing is."""

import pytest
import yaml

from shoal.spec.load import load_job
from shoal.terminal import hints
from tests.conftest import MLP


def hint(folder, asked, **written):
    """`--workers ASKED` for a job file with these fields; None leaves one out."""
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump({name: value for name, value in (MLP | written).items() if value is not None}))
    job = load_job(path, overrides=[f"workers={asked}"], check_names=False)
    return hints.lanes_hint(job, path, [])


@pytest.mark.parametrize(
    ("asked", "written", "told"), [("4", 1, "4 instead of 1"), ("1..8", 2, "8 instead of 2"), ("1", "1..3", "lanes: 3")]
)
def test_lanes_that_follow_the_workers(tmp_path, asked, written, told):
    assert told in hint(tmp_path, asked, lanes=None, workers=written)


@pytest.mark.parametrize("written", [{"lanes": 8}, {"lanes": None, "workers": "1..4"}])
def test_the_result_of_the_file(tmp_path, written):
    assert hint(tmp_path, "4", **written) == ""


def test_a_file_that_is_right_only_with_other_workers(tmp_path):
    assert hint(tmp_path, "2", lanes=None, workers=51) == "", "more than its batch has samples"
