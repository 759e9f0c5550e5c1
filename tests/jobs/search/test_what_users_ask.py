"""What a user writes under `search`, with real runs: objectives, folds, sections as choices, engines, ways to start."""

import json

import pytest
import yaml
from typer.testing import CliRunner

import shoal
from shoal import cli
from shoal.jobs.search.summary import compare_searches, read_search, search_data
from tests.jobs.search.test_search import job_file  # noqa: F401

GRID = {"policy": {"kind": "full", "sampler": "grid"}}


@pytest.mark.long
def test_size_and_latency_are_objectives_and_the_front_is_told(search):
    asked = GRID | {"space": {"model.args.hidden": [2, 64]}, "metric": ["accuracy", "size", "latency"]}
    outcome = search(1, search=asked | {"budget": "2 trials"}, steps=60)
    found = read_search(outcome.paths)
    small, large = (found.table.trials[n].facts for n in (0, 1))
    assert (small["size"], large["size"]) == tuple(4 * (64 * h + h + h * 10 + 10) for h in (2, 64))
    assert 0 < small["latency"] < 1000
    assert 0 in search_data(found)["front"]  # nothing is smaller
    assert (outcome.receipt.exact, outcome.receipt.why) == (False, "latency is measured on this machine")


@pytest.mark.long
def test_a_constraint_on_the_size_leaves_large_trials_untrained(search):
    asked = GRID | {"space": {"model.args.hidden": [2, 64]}, "constraints": "size <= 1000", "budget": "2 trials"}
    outcome = search(1, search=asked)
    assert outcome.receipt.winner == 0
    assert not outcome.paths.trial(1).root.exists()
    assert outcome.receipt.exact is True, outcome.receipt.why


@pytest.mark.long
def test_another_engine_has_the_same_journal(search):
    """Each stretch starts an agent of its own there, so that three are enough."""
    asked = {"policy": {"kind": "promote", "sampler": "random", "first": 1}, "budget": "1 trial", "slots": 1}
    here, apart = (search(1, search=asked, **more) for more in ({}, {"engine": {"kind": "local", "apart": True}}))
    assert compare_searches(read_search(here.paths), read_search(apart.paths)).difference == ""
    assert apart.receipt.search_sha256 == here.receipt.search_sha256
    assert apart.receipt.decisions == 2


@pytest.mark.long
@pytest.mark.parametrize("split", ["kfold", "timeseries"])
def test_a_trial_that_is_worse_on_every_fold_is_stopped_early(split, search, make):
    data = make().dump()["data"] | {"split": {"kind": split, "folds": 4}}
    space = {"optimizer.args.lr": [0.05, 1e-9]}
    asked = {"space": space, "policy": {"kind": "promote", "sampler": "grid"}, "slots": 1, "budget": "2 trials"}
    found = [search(workers, data=data, search=asked, steps=40) for workers in (1, 2)]
    good, bad = read_search(found[0].paths).table.trials.values()
    assert (good.unit, good.units, good.state) == (4, 4, "complete")
    assert (bad.unit < bad.units, bad.state) == (True, "paused")
    assert found[0].receipt.winner == good.number
    assert found[0].receipt.search_sha256 == found[1].receipt.search_sha256


@pytest.mark.long
def test_sections_as_choices_train_with_the_section_that_was_chosen(search):
    sections = [{"name": "AdamW"}, {"name": "SGD", "args": {"momentum": {"low": 0.5, "high": 0.99}}}]
    space = {"optimizer.args.lr": {"low": 1e-3, "high": 1e-1, "log": True}, "optimizer": sections}
    outcome = search(2, search={"space": space, "policy": {"kind": "full", "sampler": "sobol"}})
    names = set()
    for number in range(4):
        optimizer = yaml.safe_load(outcome.paths.trial(number).job.read_text())["optimizer"]
        names.add(optimizer["name"])
        assert set(optimizer["args"]) == ({"lr", "momentum"} if optimizer["name"] == "SGD" else {"lr"})
    assert names == {"AdamW", "SGD"}


@pytest.mark.long
def test_every_way_to_start_is_one_search(search, make, job_file, job_dir, monkeypatch):  # noqa: F811
    """Job file, `--space FILE` and Python; then `best`, `show` and `compare` as a user calls them."""
    monkeypatch.chdir(job_dir)
    whole = job_file()
    data = yaml.safe_load(whole.read_text())
    asked = data.pop("search")
    (job_dir / "plain.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
    (job_dir / "space.yaml").write_text(yaml.safe_dump({"search": asked}, sort_keys=False))
    runner = CliRunner()
    for arguments in (["job.yaml"], ["plain.yaml", "--space", "space.yaml"]):
        ended = runner.invoke(cli.app, ["search", *arguments, "--json"], catch_exceptions=False)
        assert ended.exit_code == 0, ended.output
    third = shoal.search(shoal.load_job(job_dir / "plain.yaml"), space=asked)
    assert third.paths.name == "small-3"
    for other in ("small-2", "small-3"):
        same = runner.invoke(cli.app, ["search", "compare", "small-1", other, "--json"])
        assert (same.exit_code, json.loads(same.stdout)["same"]) == (0, True)
    best = runner.invoke(cli.app, ["search", "best", "last"])
    assert yaml.safe_load(best.stdout)["optimizer"]["args"]["lr"] == third.receipt.changes["optimizer.args.lr"]
    shown = json.loads(runner.invoke(cli.app, ["search", "show", "last", "--json"]).stdout)
    assert (shown["best"], len(shown["trials"])) == (third.receipt.winner, 4)
    shoal.search(shoal.load_job(job_dir / "plain.yaml"), space=asked | {"seed": 5})
    differ = runner.invoke(cli.app, ["search", "compare", "small-1", "last"])
    assert differ.exit_code == 1
