"""The benchmark of the web page works, with small sizes."""

import pytest
from benchmarks.web.__main__ import many_points

pytestmark = pytest.mark.long


def test_the_extremes_of_a_curve_arrive(tmp_path):
    found = many_points(tmp_path, True)
    assert "True" in found["what"]
    assert len(found["rows"]) == 4
