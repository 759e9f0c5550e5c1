"""What the rivals' rows say, and how they are started."""

import json
from argparse import Namespace

from benchmarks.engines import __main__ as engines
from benchmarks.engines import rivals


def test_a_step_that_was_under_way_at_the_kill_does_not_count():
    killed = {"t": 10.0, "step": 500, "pid": 2}
    assert not rivals._goes_on({"t": 10.1, "step": 501, "pid": 1}, 10.0, {1, 2}, killed)
    assert not rivals._goes_on({"t": 9.9, "step": 503, "pid": 1}, 10.0, {1, 2}, killed)
    assert rivals._goes_on({"t": 10.1, "step": 503, "pid": 1}, 10.0, {1, 2}, killed), "the others went on"
    assert rivals._goes_on({"t": 12.0, "step": 400, "pid": 3}, 10.0, {1, 2}, killed), "all began again"


def test_rows_of_all_ranks_are_in_order_and_half_a_row_waits(tmp_path):
    (tmp_path / "steps-0.jsonl").write_text('{"t": 1, "step": 1, "pid": 7}\n{"t": 3, "step": 2, "pid": 7}\n{"t": 5, ')
    (tmp_path / "steps-1.jsonl").write_text(json.dumps({"t": 2, "step": 1, "pid": 8}) + "\n")
    rows = rivals.StepRows(tmp_path)
    assert [row["t"] for row in rows.read()] == [1, 2, 3]
    with (tmp_path / "steps-0.jsonl").open("a") as file:
        file.write('"step": 3, "pid": 7}\n')
    assert [row["t"] for row in rows.read()] == [1, 2, 3, 5]


def test_every_rival_has_a_command(tmp_path):
    for rival in rivals.RIVALS:
        words = rivals.command(rival, tmp_path, address="127.0.0.1:6379")
        assert words[-1] == str(tmp_path)
        assert ("srun" in words) == rival.startswith("srun")
    assert set(engines.RIVAL_OF.values()) == set(rivals.RIVALS)


def test_a_rival_has_no_value_for_what_it_does_not_do():
    turns = [{"submit to first step": 3.0}, {"submit to first step": 5.0}]
    assert engines._median("submit to first step", turns) == 4.0
    assert engines._median("SIGTERM to left", turns) == "–"


def test_an_engine_on_this_machine_needs_no_cluster():
    with engines.cluster("apart", Namespace()) as section:
        assert section == {"kind": "local", "apart": True, "machines": 2}
