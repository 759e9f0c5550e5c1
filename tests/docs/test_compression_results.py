"""The kept results of `benchmarks.compress` meet their goals, and docs/compression.md says what they are."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEPT = json.loads((ROOT / "benchmarks/results/compress.json").read_text())
DOC = (ROOT / "docs/compression.md").read_text()
GOALS = {
    "digits-lossless": {"smaller": 2, "eager x64": 1.5},
    "lenet300-size": {"smaller": 40},
    "lenet300-smaller": {"smaller": 70},
    "lenet5-size": {"smaller": 39},
    "cnn-int8": {"smaller": 3, "eager x1": 3},
    "cnn-fast": {"smaller": 6, "eager x64": 4, "runtime x64": 1.5},
    "gpt": {"smaller": 5, "eager x1": 2, "eager x64": 2},
}
"""At least so many times smaller or faster, with each seed."""
DROPS = {
    "digits-lossless": 0.0,
    "lenet300-size": 0.001,
    "lenet300-smaller": 0.005,
    "lenet5-size": 0.001,
    "cnn-int8": 0.005,
    "cnn-fast": 0.003,
    "gpt": 0.015,
}
"""On the test part, at most: points of accuracy, or a share of the loss."""


@pytest.mark.parametrize("name", GOALS)
def test_the_kept_results_meet_the_goals(name):
    rows = KEPT[name]["seeds"]
    assert [row["seed"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert {key: row[key] for key, least in GOALS[name].items() if row[key] < least} == {}
        assert row["drop"] <= DROPS[name] + 1e-9
        chosen = next(one for one in row["rungs"] if one["name"] == row["chosen"])
        assert chosen["kept"]
        if name == "digits-lossless":
            assert chosen["certificate"]["claim"] == "proven"


def test_shrinking_meets_its_goal():
    rows = KEPT["shrink-more"]["seeds"]
    assert len(rows) == 3
    said = next(part for part in DOC.split("\n\n") if part.startswith("`shrink-more`"))
    for row in rows:
        assert row["faster"] >= 1.4
        assert row["shrunk"] >= row["dense"] - 0.001
        for number in (f"{row['faster']:.2f}", f"{row['sent']:.0%}".replace("%", " %"), points(row["shrunk"])):
            assert number in said


@pytest.mark.parametrize("name", GOALS)
def test_the_documentation_has_the_numbers_of_the_results(name):
    rows = KEPT[name]["seeds"]
    line = next(line for line in DOC.splitlines() if line.startswith(f"| `{name}`"))
    _, seeds, size, quality, times = line.strip("| ").split(" | ")
    assert int(seeds) == len(rows)
    sizes = [f"1/{row['smaller']:.1f}" for row in rows]
    assert size.startswith(", ".join(sizes if len(set(sizes)) > 1 else sizes[:1]))
    if "bytes" in size:
        assert f"{max(row['bytes'] for row in rows):,} bytes" in size
    if name != "digits-lossless":
        assert ", ".join(f"{points(row['parent'])} → {points(row['test'])}" for row in rows) in quality
        assert "at most " + ", ".join(f"{row['bound']:.{1 if name == 'gpt' else 2}%}"[:-1] for row in rows) in quality
    if name.startswith(("cnn", "gpt")):
        for key in ("eager x1", "eager x64", "runtime x1", "runtime x64"):
            assert ", ".join(f"{row[key]:.1f}" for row in rows) in times


def points(value):
    return f"{value:.4f}".lstrip("0") if value < 1 else f"{value:.3f}"
