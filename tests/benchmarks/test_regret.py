"""What a planner chose stands beside what it could have chosen."""

from dataclasses import replace

import pytest
from benchmarks.links import regret
from benchmarks.links.hosts import two_hosts
from benchmarks.links.regret import SIDES, Cell, measured_link, predictions, regrets, rows

from shoal.plan.costs.model import CodecTime
from tests.plan.cost_model_cases import CODECS, FAST_LINK, LARGE_MODEL, SLOW_LINK, machine

PLANNED = {"choice": "lanes, bf16", "said": dict.fromkeys(SIDES, 5.0)}
ENCODED = replace(LARGE_MODEL, codecs=CODECS | {"int4": CodecTime({"kind": "int4", "block": 64}, 0.01, 0.005)})


def test_cells_have_names():
    names = [cell.title for cell in (Cell("gpt", 100.0), Cell("mlp", float("inf"), slow=3))]
    assert names == ["regret: gpt, 100 Mbit/s, equal", "regret: mlp, unshaped, one 3 times slower"]


def test_sides_that_were_measured_from_fast_to_slow():
    found = rows(PLANNED, {"one worker": [4.0], "lanes, bf16": [6.0], "lanes, int8": [8.0]})
    assert [row["side"] for row in found] == ["lanes, int8", "lanes, bf16", "one worker"]
    assert [row["of the best"] for row in found] == [1.0, 0.75, 0.5]
    assert [row["choice"] for row in found] == ["", "→", ""]


def test_regret_is_how_much_faster_the_best_was():
    both = rows(PLANNED, {"one worker": [9.0], "lanes, bf16": [6.0]})
    kept = {
        "regret: gpt, 100 Mbit/s, equal": {"planner": PLANNED, "rows": both},
        "regret: cnn, 100 Mbit/s, equal": {"planner": PLANNED, "rows": both[:1]},
        "gpt: 100 Mbit/s": {"rows": []},
    }
    first, second = regrets(kept)
    assert (first["cell"], first["best"], first["regret"]) == ("gpt, 100 Mbit/s, equal", "one worker", 1.5)
    assert second["regret"] == "", "the choice has not been measured"


def test_sides_that_were_measured_before_are_kept(monkeypatch):
    cell = Cell("gpt", 100.0)
    before = {cell.title: {"rows": rows(PLANNED, {"one worker": [4.0], "lanes, none": [1.0]})}}
    monkeypatch.setattr(regret.report, "kept", lambda name: before)
    found = regret.with_kept(cell, PLANNED, {"lanes, none": [2.0], "lanes, bf16": [3.0]})
    true = {row["side"]: row["steps/s"] for row in found["rows"]}
    assert true == {"one worker": 4.0, "lanes, bf16": 3.0, "lanes, none": 2.0}


def test_what_all_had_together_does_not_count():
    together = {"lanes, none": [5.0, 10.0, 5.0], "lanes, int8": [6.0, 12.0, 6.0], "lanes, int4": [7.0, 14.0, 7.0]}
    found = regret.levels({"one worker": [4.0], **together})
    assert found == pytest.approx({"one worker": 4.0, "lanes, none": 5.0, "lanes, int8": 6.0, "lanes, int4": 7.0})
    odd = regret.levels({"lanes, none": [5.0, 0.1], "lanes, int8": [6.0, 6.0]})
    assert odd["lanes, int8"] == 6.0, "what happened to one is nobody else's"
    lucky = regret.levels({"lanes, none": [5.0, 10.0, 10.0], "lanes, int8": [6.0, 6.0, 6.0]})
    assert lucky["lanes, none"] > lucky["lanes, int8"]


def test_who_was_close_and_the_choice_have_another_turn():
    found = {"one worker": [4.0], "lanes, none": [5.0, 9.0], "lanes, bf16": [1.0], "lanes, int8": [3.9]}
    assert regret.contenders(found, "lanes, none") == ["lanes, none"]
    assert regret.contenders(found, "lanes, bf16") == ["lanes, none", "lanes, bf16"]
    assert regret.contenders(found | {"one worker": [4.1]}, "lanes, none") == ["one worker", "lanes, none"]


def test_every_side_is_predicted_and_a_slow_host_is_never_faster():
    for link in (FAST_LINK, SLOW_LINK):
        equal, slow = (predictions(SIDES, ENCODED, machine(), link, times) for times in (1, 3))
        assert list(equal) == list(SIDES)
        assert all(0 < equal[name].step_s <= slow[name].step_s for name in SIDES)


@pytest.mark.root
def test_the_planner_measures_the_wire():
    with two_hosts() as hosts:
        found = measured_link(hosts, 10.0)
        hosts.unshape()
    for speed in (found.send_bytes_s, found.receive_bytes_s):
        assert 0.9e6 < speed < 1.6e6, "1.25 MB/s"


def test_where_the_link_is_slow_there_is_more_to_choose_from():
    assert "local 128, int4" in Cell("gpt", 10.0).sides
    assert Cell("gpt", 100.0).sides is SIDES
