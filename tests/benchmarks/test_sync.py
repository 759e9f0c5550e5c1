"""The parts that make the comparison fair: the same batches on any number of processes, and nobody left out."""

import itertools
import json

import pytest
import torch
from benchmarks.sync import ddp, lanes, stopwatch


@pytest.mark.parametrize("workers", [2, 3])
def test_ranks_share_the_batches_of_one_process(workers):
    inputs = torch.arange(40)
    alone = ddp.batches(inputs, -inputs, 12, rank=0, workers=1)
    shared = [ddp.batches(inputs, -inputs, 12, rank=rank, workers=workers) for rank in range(workers)]
    for (x, _), *parts in itertools.islice(zip(alone, *shared, strict=True), 8):
        assert sorted(torch.cat([part for part, _ in parts]).tolist()) == sorted(x.tolist())
        assert all(torch.equal(targets, -part) for part, targets in parts)


def test_the_window_holds_the_steps_that_were_asked_for(tmp_path):
    model = stopwatch.timed("mlp", steps=5, calls=2, reports=str(tmp_path))
    assert (model.last - model.first) / 2 == 5
    assert model.last < 2 * stopwatch.steps_to_run(5)


def test_the_slowest_counts_and_all_must_report(tmp_path):
    for number, seconds in enumerate((1.0, 3.0)):
        (tmp_path / f"{number}.json").write_text(json.dumps({"wall_s": seconds, "cpu_s": 0.5}))
    assert stopwatch.gather(tmp_path, workers=2) == {"wall_s": 3.0, "cpu_s": 1.0}
    with pytest.raises(RuntimeError, match="3 workers were to report, 2 did"):
        stopwatch.gather(tmp_path, workers=3)


def test_lanes_that_cannot_be_split_evenly_are_refused(tmp_path):
    with pytest.raises(ValueError, match="evenly"):
        lanes.run("mlp", tmp_path, steps=1, workers=2, lanes=3, reports=tmp_path, runs=tmp_path, fork_server=None)
