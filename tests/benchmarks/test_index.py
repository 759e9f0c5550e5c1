"""The benchmark of the index, small: snapshots are left behind, and the second look is the faster one."""

import pytest
from benchmarks.index.__main__ import PARTS, measure


@pytest.mark.parametrize("part", PARTS)
def test_every_look_is_timed(part, tmp_path):
    found = measure(part, tmp_path, quick=True)
    seconds = {row["look"]: row["cpu s"] for row in found["rows"]}
    assert {"fold all", "cold", "warm"} <= seconds.keys()
    assert seconds["warm"] < seconds["cold"]
    assert list(tmp_path.glob("*/.state.json"))
