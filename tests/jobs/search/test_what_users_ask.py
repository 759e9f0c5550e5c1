"""What a user writes under `search`, with real runs: objectives, folds, sections as choices, engines, ways to start."""

import json

import pytest
import yaml
from torch import nn
from typer.testing import CliRunner

import shoal
from shoal import cli
from shoal.errors import ErrorGroup, ShoalError
from shoal.events import read_events
from shoal.jobs.search.driver import run_search
from shoal.jobs.search.journal import DecidedRow, rows_of
from shoal.jobs.search.receipt import canonical_rows
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


@pytest.mark.parametrize(
    ("asked", "place"),
    [
        ({"space": {"batch_size": [16, -2]}}, "search.space.batch_size"),
        ({"space": {"optimizer": [{"name": "SGD"}, {"name": "Sgd"}]}}, "search.space.optimizer"),
        ({"space": {"optimizer.args.momentu": [0.5, 0.9]}}, "search.space.optimizer.args.momentu"),
        (
            {"space": {"optimizer": [{"name": "AdamW"}], "optimizer.args.momentum": {"low": 0.5, "high": 0.99}}},
            "search.space.optimizer.args.momentum",
        ),
        ({"space": {"shard": ["none", {"kind": "fsdp", "size": 3}]}}, "search.space.shard"),
        ({"space": {"sync": ["lanes", "auto"]}}, "search.space.sync"),
        ({"policy": {"sampler": "optuna:Nobody"}}, "search.policy.sampler"),
        ({"policy": {"sampler": "optuna:CmaEsSampler"}}, "search.policy.sampler"),
        ({"policy": {"sampler": {"name": "optuna:TPESampler", "args": {"a": 1}}}}, "search.policy.sampler.args"),
        ({"start": ["nobody-7"]}, "nobody-7"),
    ],
)
def test_a_bad_search_names_the_field_and_leaves_nothing_behind(asked, place, make, job_dir):
    if "optuna" in str(asked):
        pytest.importorskip("optuna")
    (job_dir / "runs").mkdir()
    with pytest.raises(ShoalError) as caught:
        run_search(make(search=asked), runs=job_dir / "runs")
    problems = caught.value.errors if isinstance(caught.value, ErrorGroup) else [caught.value]
    assert place in [problem.where for problem in problems]
    assert list((job_dir / "runs").iterdir()) == []


@pytest.mark.long
def test_all_workers_of_a_trial_stop_at_the_same_step(search):
    """A trial whose model is sharded over two workers is paused at its first rung, and goes on."""
    asked = {"policy": {"kind": "promote", "sampler": "random", "first": 1}, "budget": "1 trial", "slots": 1}
    outcome = search(2, search=asked, shard={"kind": "fsdp", "size": 2}, workers=2)
    left = [event for event in read_events(outcome.paths.trial(0).events) if event.kind == "left"]
    paused = [event for event in left if event["why"] == "paused"]
    assert {(event.who, event.step) for event in paused} == {("worker-0", 4), ("worker-1", 4)}
    assert [row.end for row in rows_of(read_search(outcome.paths).rows, DecidedRow)] == [1, 3]


@pytest.mark.long
def test_a_helper_stops_early_at_the_same_step_as_the_worker_that_it_helps(search):
    """The idle worker takes over a lane, and both leave at the first rung. Helpers go when less than two seconds are
    left; here each step takes three."""
    slow = {"faults": {"pause_probability": 1.0, "pause_s": 3.0}, "steps": 10, "evaluate": {"every_steps": 5}}
    asked = {"policy": {"kind": "promote", "sampler": "random", "first": 1}, "budget": "1 trial", "slots": 1}
    alone, helped = (search(workers, search=asked, **slow) for workers in (1, 2))
    events = list(read_events(helped.paths.trial(0).events))
    paused = [(event.who, event.step) for event in events if event.kind == "left" and event["why"] == "paused"]
    assert sorted(paused) == [("worker-0", 5), ("worker-1", 5)]
    assert helped.receipt.search_sha256 == alone.receipt.search_sha256


@pytest.mark.long
def test_the_best_few_are_repeated_with_other_seeds_and_the_best_mean_wins(search):
    found = [search(workers, search={"repeat": 3, "budget": "5 trials"}) for workers in (1, 2)]
    assert found[0].receipt.search_sha256 == found[1].receipt.search_sha256
    trials = read_search(found[0].paths).table.trials
    assert len(trials) == 5 + 3 * 2
    means = {}
    for trial in list(trials.values())[:5]:
        own = {path: value for path, value in trial.changes.items() if path != "seed"}
        alike = [one for one in trials.values() if {**one.changes, "seed": 0} == {**own, "seed": 0}]
        if len(alike) == 3:
            assert sorted(one.changes.get("seed", 0) for one in alike) == [0, 1, 2]
            means[trial.number] = sum(max(row["accuracy"] for row in one.rows) for one in alike) / 3
    assert len(means) == 3
    assert found[0].receipt.winner == max(means, key=means.get)


@pytest.mark.long
def test_the_best_trial_does_not_win_if_a_metric_of_it_breaks_a_constraint(search):
    free = search(2)
    best = read_search(free.paths).best
    least = best.rows[-1]["loss"] + 1e-6
    found = [search(workers, search={"constraints": [f"loss >= {least!r}"]}) for workers in (1, 2)]
    assert found[0].receipt.search_sha256 == found[1].receipt.search_sha256
    stored = read_search(found[0].paths)
    assert stored.judge.breaks(stored.table.trials[best.number])
    others = {n: t for n, t in stored.table.trials.items() if t.rows[-1]["loss"] >= least}
    assert others
    assert found[0].receipt.winner == max(others, key=lambda n: max(row["accuracy"] for row in others[n].rows))


@pytest.mark.long
def test_hours_end_the_same_search_earlier(search):
    """The winner is trained to its end, and the receipt says that the end depends on the speed."""
    slow = {"faults": {"pause_probability": 1.0, "pause_s": 0.05}}
    asked = {"policy": {"kind": "promote", "sampler": "random", "first": 1}}
    short = search(1, search=asked | {"budget": {"hours": 0.001}}, **slow)
    longer = search(2, search=asked | {"budget": "30 trials"})
    assert short.receipt.ended == "0.001 hours are over"
    assert (short.receipt.exact, len(short.receipt.interventions)) == (False, 1)
    decided = [canonical_rows(read_search(one.paths).rows)["decisions"] for one in (short, longer)]
    common = len(rows_of(read_search(short.paths).rows, DecidedRow)) - 1  # the last may be the winner's
    assert 2 < common < len(decided[1])
    assert decided[0][:common] == decided[1][:common]
    assert read_search(short.paths).best.state == "complete"


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
    model = shoal.load(f"{third.paths.name}/trial-{third.receipt.winner}")
    assert isinstance(model, nn.Module)
    best = runner.invoke(cli.app, ["search", "best", "last"])
    assert yaml.safe_load(best.stdout)["optimizer"]["args"]["lr"] == third.receipt.changes["optimizer.args.lr"]
    shown = json.loads(runner.invoke(cli.app, ["search", "show", "last", "--json"]).stdout)
    assert (shown["best"], len(shown["trials"])) == (third.receipt.winner, 4)
    shoal.search(shoal.load_job(job_dir / "plain.yaml"), space=asked | {"seed": 5})
    differ = runner.invoke(cli.app, ["search", "compare", "small-1", "last"])
    assert differ.exit_code == 1
