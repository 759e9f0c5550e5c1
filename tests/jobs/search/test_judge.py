"""What is shown of trials is what the plan counts: also for metrics that become worse, means, and constraints."""

import json
import math

import pytest
import yaml
from typer.testing import CliRunner

from shoal import cli
from shoal.errors import ShoalError
from shoal.jobs.search import search_dir
from shoal.jobs.search.journal import EndedRow, Journal, StartedRow, ToldRow
from shoal.jobs.search.summary import best_job_text, read_search, search_data
from shoal.jobs.search.trials import trial_job
from shoal.plan.search.make import objectives
from shoal.spec.job import MonitorConfig
from shoal.terminal.search_report import spent_text
from tests.jobs.search.test_replay import continued, search_job


def overfitting(changes, unit):
    """The accuracy is best in the middle of the training, the loss at its beginning."""
    gap = abs(changes["optimizer.args.lr"] - 0.01) * 20
    return {"accuracy": 5 - abs(unit - 4) - gap, "loss": 1 + unit * gap}


KINDS = {
    "one metric": {},
    "smaller is better": {"metric": "loss"},
    "several metrics": {"metric": ["accuracy", "loss", "parameters"]},
    "a constraint on a metric": {"constraints": ["loss <= 2.3"]},
    "a constraint on a fact": {"constraints": ["parameters <= 50"]},
    "seeds": {"seeds": 9, "policy": {"kind": "promote", "sampler": "random"}},
    "seeds and a constraint": {"seeds": 9, "policy": {"kind": "full", "sampler": "random"}, "constraints": "loss <= 2"},
}


def played(tmp_path, asked, metrics=overfitting):
    """A search of trials that overfit, as its directory tells it."""
    job = search_job(**asked)
    rows = continued(
        job, [], metrics=metrics, facts=lambda changes: {"parameters": round(1000 * changes["optimizer.args.lr"])}
    )
    paths = search_dir.create(job, tmp_path)
    journal = Journal(paths.journal)
    for row in [StartedRow(job_sha256=job.sha256()), *rows]:
        journal.append(row)
    journal.close()
    return read_search(paths)


@pytest.mark.parametrize("kind", KINDS)
def test_values_shown_are_those_that_the_plan_counts(kind, tmp_path):
    found = played(tmp_path, KINDS[kind])
    counted = {trial.number: trial for trial in found.summary.trials if trial.unit}
    assert len(counted) >= 4
    for trial in search_data(found)["trials"]:
        if trial["trial"] in counted:
            shown = {metric: value for metric, value in trial["values"].items() if math.isfinite(value)}
            assert shown == pytest.approx(counted[trial["trial"]].values), kind
    assert found.best.number == found.ranked[0].number == found.summary.best


def test_no_trial_that_is_shown_beats_one_of_the_front(tmp_path):
    found = played(tmp_path, KINDS["several metrics"])
    rows = {t["trial"]: t["values"] for t in search_data(found)["trials"] if t["unit"]}
    signs = {goal.metric: goal.sign for goal in found.judge.objectives}
    assert len(found.summary.front) > 1
    for one in found.summary.front:
        for other in rows.values():
            gains = [signs[m] * (other[m] - rows[one][m]) for m in signs]
            assert not (min(gains) >= 0 and max(gains) > 0)


def test_what_breaks_a_constraint_is_not_the_best_while_the_search_goes_on(tmp_path):
    found = played(tmp_path, KINDS["a constraint on a metric"] | {"budget": "12 trials"})
    rows = [row for row in found.rows if not isinstance(row, EndedRow)]
    checked = broken = 0
    for length, row in enumerate(rows):
        if isinstance(row, ToldRow):
            (found.paths.journal).write_text("".join(r.model_dump_json() + "\n" for r in rows[: length + 1]))
            now = read_search(found.paths)
            assert now.status == "stopped"
            values = [now.judge.value(t) for t in now.table.trials.values()]
            if now.best is not None:
                checked += 1
                assert now.best.rows[-1]["loss"] <= 2.3
                broken += now.judge.value(now.best) < max(v for v in values if math.isfinite(v))
    assert checked > 5
    assert broken, "the constraint never mattered"


@pytest.mark.parametrize(
    ("fields", "signs"),
    [
        ({"metric": "accuracy"}, [1]),
        ({"metric": "accuracy", "best": {"metric": "accuracy", "mode": "min"}}, [-1]),
        ({"metric": ["loss", "accuracy"], "best": {"metric": "accuracy", "mode": "min"}}, [-1, -1]),
        ({"metric": {"metric": "accuracy", "mode": "max"}, "best": {"metric": "accuracy", "mode": "min"}}, [1]),
        ({"metric": [], "best": {"metric": "accuracy"}}, [1]),
    ],
)
def test_a_direction_that_the_job_states_holds_for_the_search(fields, signs):
    fields = dict(fields)
    best = MonitorConfig(**fields.pop("best", {}))
    assert [goal.sign for goal in objectives(search_job(**fields).model_copy(update={"best": best}))] == signs


@pytest.mark.parametrize(
    ("metric", "own", "best"),
    [
        ("accuracy", {}, {"metric": "accuracy", "mode": "max"}),
        ("loss", {}, {"metric": "loss", "mode": "auto"}),
        ("accuracy", {"metric": "loss", "mode": "max"}, {"metric": "loss", "mode": "max"}),
        (["accuracy", "loss"], {}, {"metric": "loss", "mode": "auto"}),
    ],
)
def test_a_trial_keeps_the_weights_of_the_value_that_counts(metric, own, best, tmp_path):
    """`shoal.load(..., best=True)` has the accuracy that the search shows; so has a run of the best job."""
    job = search_job(metric=metric).model_copy(update={"best": MonitorConfig(**own)})
    paths = search_dir.create(job, tmp_path)
    assert trial_job(job, {"optimizer.args.lr": 0.01}, paths).best.model_dump() == best
    found = played(tmp_path, {"metric": metric})
    assert own or yaml.safe_load(best_job_text(found))["best"] == best


def prefixes(found):
    """The search after each of its results, as another process reads it."""
    rows = [row for row in found.rows if not isinstance(row, EndedRow)]
    for length, row in enumerate(rows):
        if isinstance(row, ToldRow):
            found.paths.journal.write_text("".join(r.model_dump_json() + "\n" for r in rows[: length + 1]))
            yield read_search(found.paths)


def test_a_repetition_with_another_seed_is_never_the_best(tmp_path):
    """A later seed may have easier validation data. The repeated trial wins or loses, with the mean over its seeds."""

    def easier(changes, unit):
        return {"accuracy": unit - abs(changes["optimizer.args.lr"] - 0.01) + 100 * ("seed" in changes)}

    found = played(tmp_path, {"repeat": 2, "budget": "4 trials"}, metrics=easier)
    seen = [(now.best, now.ranked[0]) for now in prefixes(found)]
    assert any("seed" in first.changes for _, first in seen)
    assert all("seed" not in best.changes for best, _ in seen)


def test_the_best_of_several_metrics_has_all_of_them(tmp_path):
    """The number of parameters is known before anything is trained."""
    found = played(tmp_path, {"metric": ["parameters", "accuracy"]})
    assert [now.best.rows != [] for now in prefixes(found)] == [True] * len(found.table.told)


def test_a_copy_counts_for_what_it_trains_itself(tmp_path):
    """A budget counts the training of the copied trial once."""
    policy = {"kind": "population", "size": 4, "every": 2, "sampler": "random"}
    found = played(tmp_path, {"policy": policy, "space": {"optimizer.args.lr": {"low": 1e-4, "high": 1e-1}}})
    assert any(trial.copy_of for trial in found.table.trials.values())
    assert found.table.spent == pytest.approx(found.summary.spent)


def test_a_budget_of_trials_counts_no_refused_trial_and_no_repetition(tmp_path):
    found = played(tmp_path, {"repeat": 3, "budget": "6 trials", "constraints": ["parameters <= 5"]})
    states = [trial["state"] for trial in search_data(found)["trials"]]
    assert states.count("refused") > 0
    assert "proposed" not in states
    assert len(states) > 6 + states.count("refused")
    assert spent_text(found.table, found.job).startswith("6/6 trials")


def strict_json(arguments):
    """What a command prints, as readers take it that know no NaN."""
    shown = CliRunner().invoke(cli.app, ["search", *map(str, arguments), "--json"])
    assert shown.exit_code in (0, 1), shown.output

    def refuse(constant):
        raise ValueError(constant)

    return json.loads(shown.stdout, parse_constant=refuse)


def test_show_writes_json_also_of_numbers_that_are_not_finite(tmp_path):
    def diverging(changes, unit):
        return {"accuracy": math.nan if unit else 0.5, "loss": math.inf}

    found = played(tmp_path, {"constraints": ["parameters <= 5"], "budget": "4 trials"}, metrics=diverging)
    trials = strict_json(["show", found.paths.root])["trials"]
    assert {trial["state"]: trial["values"] for trial in trials}["refused"] == {}
    trained = next(trial for trial in trials if trial["unit"] > 1)
    assert trained["values"] == {"accuracy": 0.5}
    assert trained["rows"][1] == {"accuracy": "NaN", "loss": "Infinity"}


def test_compare_writes_both_searches_also_if_they_have_one_name(tmp_path):
    found = [played(tmp_path / name, {"budget": "2 trials"}).paths.root for name in "ab"]
    assert found[0].name == found[1].name
    compared = strict_json(["compare", *found])
    assert compared["same"]
    assert list(compared["searches"]) == [str(root) for root in found]


def test_a_search_that_ended_without_a_winner_is_not_waited_for(tmp_path):
    found = played(tmp_path, {"constraints": ["loss <= 0"], "budget": "2 trials"})
    with pytest.raises(ShoalError) as caught:
        best_job_text(found)
    assert caught.value.code == "SH606"
    assert "Wait" not in str(caught.value)
    assert "shoal search show" in caught.value.fix
