"""Results are kept beside each other, and names on the command line are checked."""

import argparse
import json

import pytest

from benchmarks import report


def test_results_of_parts_stand_beside_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    for part, speed in (("loop", 1.0), ("lanes", 2.0), ("loop", 3.0)):
        report.keep("overhead", part, {"rows": [{"samples/s": speed}]})
    kept = json.loads((tmp_path / "results" / "overhead.json").read_text())
    assert {name: content["rows"][0]["samples/s"] for name, content in kept.items()} == {"loop": 3.0, "lanes": 2.0}
    assert all(content["machine"] == report.machine() for content in kept.values())


@pytest.mark.parametrize("names", [[], ["loop"], ["lanes", "loop"]])
def test_any_number_of_names(names):
    parser = argparse.ArgumentParser()
    report.take_names(parser, "part", ("loop", "lanes"))
    assert parser.parse_args(names).parts == names


def test_a_name_that_nobody_knows(capsys):
    parser = argparse.ArgumentParser()
    report.take_names(parser, "part", ("loop", "lanes"))
    with pytest.raises(SystemExit):
        parser.parse_args(["loop", "lane"])
    assert "no such part: lane" in capsys.readouterr().err
