"""The benchmark of the index, small: every look is timed."""

import pytest
from benchmarks.index.__main__ import PARTS, measure


@pytest.mark.parametrize("part", PARTS)
def test_every_look_is_timed(part, tmp_path):
    found = measure(part, tmp_path, quick=True)
    seconds = {row["look"]: row["s"] for row in found["rows"]}
    assert {"fold all", "cold", "warm"} <= seconds.keys()
    assert all(value > 0 for value in seconds.values())
