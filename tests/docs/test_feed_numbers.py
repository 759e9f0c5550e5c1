"""What the documentation says of loading while a network trains is what was kept; and loading does not hold it back."""

import json

import pytest

from tests.docs.pages import ROOT

KEPT = json.loads((ROOT / "benchmarks" / "results" / "overhead.json").read_text())["feed"]["rows"]
PAGE = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
MADE = "the table's batches, made before"
PLAIN = "DataLoader, 8 groups shuffled together"


def kept(network, batches):
    (found,) = [one for one in KEPT if (one["network"], one["batches"]) == (network, batches)]
    return found


@pytest.mark.parametrize("network", ["small", "larger"])
def test_training_seldom_waits_for_a_batch(network):
    ours, plain = kept(network, "shoal, Parquet"), kept(network, PLAIN)
    assert ours["waiting for batches"] < min(0.01, plain["waiting for batches"])
    assert f"{100 * ours['waiting for batches']:.1f} %" in PAGE


def test_the_table_tells_the_steps_that_were_kept():
    ratios = [
        " / ".join(f"{kept(network, batches)['of batches in memory']:.2f}" for network in ("small", "larger"))
        for batches in ("shoal, Parquet", PLAIN)
    ]
    assert "| {} (that plain reader: {}) |".format(*ratios) in PAGE
    assert f"made before training begins, give {kept('small', MADE)['of batches in memory']:.2f} of the steps" in PAGE
