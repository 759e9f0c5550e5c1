"""A journal is continued from any of its rows, by the same decisions. No run is needed for that."""

import contextlib
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.errors import ShoalError
from shoal.jobs import run_index
from shoal.jobs.search.journal import DecidedRow, EndedRow, ShapeRow, StartedRow, ToldRow, parse_row
from shoal.jobs.search.receipt import decisions_sha256
from shoal.jobs.search.replay import check_again, replay
from shoal.jobs.search.search_dir import SearchPaths
from shoal.jobs.search.summary import read_search, search_data
from shoal.plan.search.make import make_search
from shoal.plan.search.trial import SearchEnd, ShapeWanted, Stretch
from shoal.spec.load import make_job
from shoal.spec.run_paths import RunPaths
from shoal.spec.yaml_document import write_value
from tests.jobs.search.conftest import SMALL

PROMOTE = {"policy": {"kind": "promote", "sampler": "random", "first": 1}, "budget": "6 trainings", "slots": 3}


def search_job(**search):
    return make_job(SMALL | {"search": SMALL["search"] | PROMOTE | search}, base_dir="tests/fixtures")


def rising(changes, unit):
    return {"accuracy": unit - abs(changes["optimizer.args.lr"] - 0.01) * 20}


def continued(job, rows, *, take=min, facts=lambda changes: {}, metrics=rising, units=9):
    """The rows of the whole search. `take` chooses which of the stretches without a result is told next; `facts` are
    those of a trial with these changes, `metrics` those after a unit."""
    rows = list(rows)
    plan = make_search(job)
    undone = replay(plan, rows)
    shapes = {row.trial: row for row in rows if isinstance(row, ShapeRow)}
    while True:
        decision = plan.decide()
        if isinstance(decision, ShapeWanted):
            known = shapes.get(decision.trial)
            changes = dict(decision.changes)
            made = {"changes": changes, "facts": facts(changes), "memory": list(decision.memory)}
            row = known or ShapeRow(trial=decision.trial, units=units, cost=9.0, **made)
            rows += [] if known else [row]
            plan.tell_shape(row.trial, row.shape)
        elif isinstance(decision, Stretch):
            rows.append(DecidedRow.of(decision))
            undone[decision.number] = decision
        elif isinstance(decision, SearchEnd):
            return [*rows, EndedRow(best=decision.best, why=decision.why)]
        else:
            stretch = undone.pop(take(undone))
            values = [metrics(stretch.changes, unit) for unit in range(stretch.start, stretch.end)]
            rows.append(ToldRow(number=stretch.number, rows=values))
            plan.tell(stretch.number, rows[-1].result)


WHOLE = continued(search_job(), [])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, len(WHOLE) - 1), st.sampled_from([min, max]))
def test_any_prefix_leads_to_the_same_search(length, take):
    again = continued(search_job(), WHOLE[:length], take=take)
    assert decisions_sha256(again) == decisions_sha256(WHOLE)
    assert again[-1] == WHOLE[-1]


NUMBERS = {"optimizer.args.lr": {"low": 1e-4, "high": 1e-1}, "clip.norm": {"low": 0.1, "high": 10.0}}
OPTUNA = [{"name": "optuna:TPESampler"}, {"name": "optuna:NSGAIISampler", "args": {"population_size": 6}}]
CASES = {
    **{
        str(sampler): {"policy": {"kind": "promote", "sampler": sampler, "first": 1}}
        for sampler in ("random", "sobol", "tpe", "gp", "cmaes", "nsga2", *OPTUNA)
    },
    "hyperband": {"policy": {"kind": "hyperband", "sampler": "gp"}},
    "full": {"policy": {"kind": "full", "sampler": "gp"}, "repeat": 2},
    "population": {"space": {"optimizer.args.lr": NUMBERS["optimizer.args.lr"]}, "policy": {"kind": "population"}},
    "several metrics": {"policy": {"sampler": "gp"}, "metric": ["accuracy", "parameters"]},
    "constraint": {"policy": {"sampler": "gp"}, "constraints": ["parameters <= 50"]},
    "clock": {"policy": {"sampler": "gp"}, "order": "clock"},
    "finite": {"space": {"optimizer.args.lr": [0.1, 0.01, 0.001, 0.02, 0.03], "lanes": [1, 2, 3, 4]}},
}


@pytest.mark.parametrize("case", CASES)
def test_a_search_that_is_resumed_anywhere_decides_the_same(case):
    """As a new driver resumes it: with a sampler of its own, and the rows of the file. At 26 trials, all models are in
    use."""
    if "optuna" in case:
        pytest.importorskip("optuna")
    job = search_job(**{"space": NUMBERS, "budget": "26 trials", **CASES[case]})

    def facts(changes):
        return {"parameters": round(1000 * changes["optimizer.args.lr"])}

    whole = continued(job, [], facts=facts)
    assert not any(check_again(make_search(job), whole))
    for length in range(len(whole) // 3, len(whole), max(len(whole) // 9, 1)):
        read = [parse_row(row.model_dump_json().encode()) for row in whole[:length]]
        again = continued(job, read, facts=facts)
        assert decisions_sha256(again) == decisions_sha256(whole), f"resumed after row {length}"
        assert again[-1] == whole[-1]


def test_what_no_fit_of_the_model_gives_is_not_remembered():
    job = search_job(space=NUMBERS, budget="12 trials", policy={"sampler": "gp"})
    whole = continued(job, [])
    assert any(row.memory for row in whole if isinstance(row, ShapeRow))
    third_last = [i for i, row in enumerate(whole) if isinstance(row, ShapeRow)][-3]
    for memory in ([1.0], [9.0] + [1e308] * 6, [float("inf")] + [0.0] * 6, [float("nan")] * 7):
        known = whole[:third_last]
        rows = [row.model_copy(update={"memory": memory}) if isinstance(row, ShapeRow) else row for row in known]
        assert isinstance(continued(job, rows)[-1], EndedRow)


def test_a_search_that_would_propose_the_same_has_no_differences():
    assert not any(check_again(make_search(search_job()), WHOLE))


def test_other_values_in_the_journal_count_and_are_told():
    changed = {"batch_size": 16, "optimizer.args.lr": 0.0123}
    number = next(row.trial for row in reversed(WHOLE) if isinstance(row, ShapeRow))
    rows = [
        row.model_copy(update={"changes": changed}) if getattr(row, "trial", None) == number else row for row in WHOLE
    ]
    told = [row for row in rows if not isinstance(row, EndedRow)]
    assert not replay(make_search(search_job()), told)
    differences = [row for row in check_again(make_search(search_job()), told) if row is not None]
    assert [row.trial for row in differences] == [number]
    assert differences[0].proposed != changed


def test_another_decision_is_an_error():
    rows = [row.model_copy(update={"end": 7}) if isinstance(row, DecidedRow) else row for row in WHOLE]
    with pytest.raises(ShoalError) as caught:
        replay(make_search(search_job()), rows)
    assert caught.value.code == "SH630"


NASTY = [10**400, 10**30, -1, 0, 99, 1e308, "Infinity", "NaN", "text", [], {}, None, True, [1, 2], {"a": 1e308}]


def places(value, path=()):
    """The path of every value in plain data."""
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*path, key))


@st.composite
def damaged_journals(draw):
    rows = [json.loads(row.model_dump_json()) for row in [StartedRow(job_sha256="ab"), *WHOLE]]
    match draw(st.sampled_from(["value", "missing", "twice", "order"])):
        case "value":
            target = rows[draw(st.integers(0, len(rows) - 1))]
            *way, last = draw(st.sampled_from(list(places(target))))
            for key in way:
                target = target[key]
            target[last] = draw(st.sampled_from(NASTY))
        case "missing":
            del rows[draw(st.integers(0, len(rows) - 1))]
        case "twice":
            rows.insert(draw(st.integers(0, len(rows))), draw(st.sampled_from(rows)))
        case "order":
            rows = draw(st.permutations(rows))
    return rows


@settings(max_examples=120, deadline=None)
@example(rows=[json.loads(row.model_dump_json()) for row in WHOLE[:-1]] + [{"kind": "ended", "best": 99, "why": ""}])
@given(rows=damaged_journals())
def test_a_damaged_journal_is_shown_or_told_and_hides_no_other_run(tmp_path_factory, rows):
    paths = RunPaths(tmp_path_factory.mktemp("runs") / "small-1")
    paths.root.mkdir()
    paths.job.write_text(write_value(search_job().dump()))
    paths.search_journal.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (listed,) = run_index.list_summaries(paths.root.parent)
    assert listed["status"].startswith("search ")
    with contextlib.suppress(ShoalError):
        json.dumps(search_data(read_search(SearchPaths(paths))))


def test_values_outside_of_the_space_are_damage():
    """Also for a driver that resumes the search."""
    i = next(i for i, row in enumerate(WHOLE) if isinstance(row, ShapeRow))
    for value in ("text", -1.0, None, 1e999):
        changes = WHOLE[i].changes | {"optimizer.args.lr": value}
        rows = [*WHOLE[:i], WHOLE[i].model_copy(update={"changes": changes}), *WHOLE[i + 1 :]]
        with pytest.raises(ShoalError) as caught:
            replay(make_search(search_job()), rows)
        assert caught.value.code in ("SH630", "SH631")
