"""The benchmark of memory, small."""

import pytest
from benchmarks.memory.__main__ import row, run

SHAPE = {"vocabulary": 64, "context": 8, "width": 32, "heads": 4, "depth": 4, "samples": 4, "steps": 1}


@pytest.mark.long
@pytest.mark.parametrize("side", ["fsdp", "tensor", "pipeline"])
def test_every_worker_has_its_part(side):
    (alone,) = run("one", 1, SHAPE)
    found = run(side, 2, SHAPE)
    told = row(side, found, alone)
    assert told["workers"] == 2
    assert all(one["held"] < 0.7 * alone["held"] for one in found)
    assert sum(one["held"] for one in found) >= alone["held"]
