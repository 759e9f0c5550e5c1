"""What the documentation says of killed searches and of small rooms for checkpoints is what was kept."""

import json

import pytest

from tests.docs.pages import ROOT

KEPT = json.loads((ROOT / "benchmarks" / "results" / "search.json").read_text())
LINES = (ROOT / "docs" / "search.md").read_text().splitlines()


def cells(*beginning):
    """The further cells of the row that begins so."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in LINES if line.startswith("|")]
    found = [row for row in rows if row[: len(beginning)] == list(beginning)]
    assert len(found) == 1, beginning
    return found[0][len(beginning) :]


@pytest.mark.parametrize(
    ("part", "trainings"), [("kills", "some seconds"), ("kills of long trainings", "half a minute")]
)
def test_kills_cost_what_was_kept(part, trainings):
    search, trial = KEPT[part]["rows"]
    for row in (search, trial):
        assert (row["same"], row["processes left"], row["zombies"]) == (True, 0, 0)
    driver_s, pause_s = cells("the search", trainings)
    assert driver_s == f"{search['driver s']:.2f}"
    assert float(pause_s) == pytest.approx(search["pause s"], rel=0.02)
    assert float(cells("a process that trains", trainings)[-1]) == pytest.approx(trial["pause s"], rel=0.05)


def test_a_killed_search_makes_no_pause_where_stretches_last_longer_than_its_restart():
    """The goal is a second."""
    assert all(row["largest pause s"] < 0.1 for row in KEPT["kills of long trainings"]["rows"])


def test_few_checkpoints_cost_what_was_kept():
    shares = ("5 % of the paused checkpoints", "10 %", "20 %")
    for share, row in zip(shares, KEPT["disk"]["rows"], strict=True):
        assert row["same"]
        told = [f"{100 * row[name]:.1f} %" for name in ("more work", "at least")]
        assert cells(share)[1:] == told


def test_a_warm_search_is_bounded_by_its_suggestions():
    (row,) = KEPT["lcbench warm"]["rows"]
    at_1, at_ends = row["suggestions alone at 1"], row["suggestions alone at their ends"]
    assert 0.12 < at_1 < row["regret at 1"], "the goal can be reached"
    told = f"they have {at_1:.3f} at 1 and {at_ends:.3f} at their ends".replace("0.", ".")
    assert told in " ".join(" ".join(LINES).split())
    found = float(cells("regret at 1 after searches on three other tables, LCBench")[1])
    assert found == pytest.approx(row["regret at 1"], abs=0.0006)
