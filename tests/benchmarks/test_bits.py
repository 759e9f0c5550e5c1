"""The comparison of two commits finds a difference, and its cases are valid jobs."""

import pytest
from benchmarks.bits.__main__ import Tree, _row, bits_of
from benchmarks.bits.cases import cases
from benchmarks.bits.older import in_words_of
from benchmarks.report import SOURCES

from shoal.spec.load import make_job

BITS = {
    "runs/job-1": {"weights_sha256": "a" * 64, "state_sha256": "b" * 64, "metrics": {}, "samples_seen": 1, "steps": 1}
}


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_every_case_is_a_valid_job(case, job_dir):
    job = in_words_of(SOURCES, case.written(str(job_dir)))
    made = make_job(job, base_dir=str(SOURCES / "benchmarks" / "bits"), check_names=False)
    assert made.lane_count == job["lanes"]


def test_names_of_cases_are_different():
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names)


def test_equal_bits_are_equal(tmp_path):
    assert _row("case", BITS, BITS, Tree(tmp_path, tmp_path))["same"] == "yes"


@pytest.mark.parametrize("field", ["weights_sha256", "state_sha256", "metrics", "samples_seen", "steps"])
def test_a_difference_is_named(field, tmp_path):
    other = {"runs/job-1": BITS["runs/job-1"] | {field: "other"}}
    assert _row("case", BITS, other, Tree(tmp_path, tmp_path))["same"] == f"no: runs/job-1: {field}"


def test_a_run_without_a_receipt_is_not_the_same(tmp_path):
    tree = Tree(tmp_path, tmp_path)
    assert bits_of(tmp_path) == {}
    assert _row("case", {}, BITS, tree)["same"].startswith("no")
    assert _row("case", BITS, {}, tree)["same"].startswith("no")
