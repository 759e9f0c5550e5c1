"""The benchmark runs, at tiny sizes: what it measures is not judged here."""

import pytest
from benchmarks.overhead import checkpoint, feed, lanes, loader, loop, samples, side_by_side, start


@pytest.fixture
def bench(tmp_path):
    return side_by_side.Bench(tmp_path, tmp_path / "data", repeats=1, quick=True, say=lambda _: None)


def test_turns_rotate_and_ratios_are_those_of_a_turn():
    order = []
    variants = {name: lambda name=name: order.append(name) or {"s": len(order)} for name in "ABC"}
    found = side_by_side.in_turns(variants, 3)
    assert "".join(order) == "ABCBCACAB"
    assert side_by_side.median(found["A"], "s") == 6
    assert side_by_side.ratio(found["B"], found["A"], "s") == pytest.approx(9 / 8)


def test_checkpoint(bench, monkeypatch):
    state = checkpoint.make_state(8 << 20)
    monkeypatch.setattr(checkpoint, "make_state", lambda _: state)
    rows = checkpoint.measure(bench)
    sizes = {row["how"]: row["stored MB"] for row in rows if row["stored MB"]}
    assert sizes["shoal"] < sizes["torch.save"]


@pytest.mark.long
@pytest.mark.parametrize("part", [loop, lanes])
def test_loops(part, bench, monkeypatch):
    samples.gather(None, bench.data)
    monkeypatch.setattr(part, "STEPS", {"mlp": 40})
    assert all(row["samples/s"] > 0 for row in part.measure(bench))


@pytest.mark.long
def test_start(bench):
    samples.gather(None, bench.data)
    assert all(row["s"] >= 0 for row in start.measure(bench))


@pytest.mark.long
def test_loader(bench):
    assert all(row["samples/s"] > 0 for row in loader.measure(bench))


@pytest.mark.long
def test_feed(bench):
    rows = feed.measure(bench)
    assert len(rows) == 6
    assert all(row["steps/s"] > 0 and 0 <= row["waiting for batches"] < 1 for row in rows)
