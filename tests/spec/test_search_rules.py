"""Every kind of bad search fails before anything starts, and names the field."""

import pytest

from shoal.errors import ErrorGroup
from shoal.spec.search import BudgetConfig, SearchConfig
from shoal.spec.yaml_document import parse_document
from tests.plan.search.simulated_search import job_of

LR = "optimizer.args.lr"
GRID = {"kind": "full", "sampler": "grid"}
BAD_SPACES = {
    "no low": ({LR: {"high": 1}}, "SH104", LR),
    "empty range": ({LR: {"low": 2, "high": 1}}, "SH106", f"{LR}.high"),
    "text for a number": ({LR: {"low": "a", "high": 1}}, "SH105", f"{LR}.low"),
    "boolean for a number": ({LR: {"low": 0, "high": True}}, "SH105", f"{LR}.high"),
    "infinite": ({LR: {"low": 0, "high": float("inf")}}, "SH105", f"{LR}.high"),
    "log of zero": ({LR: {"low": 0, "high": 1, "log": True}}, "SH107", f"{LR}.log"),
    "log and step": ({LR: {"low": 1, "high": 9, "log": True, "step": 1}}, "SH107", f"{LR}.step"),
    "log is no boolean": ({LR: {"low": 1, "high": 9, "log": 3}}, "SH105", f"{LR}.log"),
    "large step": ({LR: {"low": 1, "high": 9, "step": 10}}, "SH106", f"{LR}.step"),
    "unknown word": ({LR: {"low": 1, "high": 9, "lgo": True}}, "SH103", f"{LR}.lgo"),
    "one value": ({LR: 0.1}, "SH105", LR),
    "no choices": ({LR: []}, "SH106", LR),
    "a choice twice": ({LR: [1, 1]}, "SH106", LR),
    "bad path": ({"optimizer..lr": [1, 2]}, "SH106", "optimizer..lr"),
    "unknown field": ({"optimiser.args.lr": [1, 2]}, "SH103", "optimiser.args.lr"),
    "not learnt": ({"workers": [1, 2]}, "SH106", "workers"),
    "tied values": ({"loss, clip.norm": [["MSELoss"]]}, "SH105", "loss, clip.norm"),
    "choose no list": ({LR: {"choose": 3}}, "SH105", f"{LR}.choose"),
    "set twice": ({"optimizer": [{"name": "SGD", "args": {"lr": 1}}], LR: [1, 2]}, "SH107", LR),
    "bad range inside": ({"optimizer": [{"name": "SGD", "args": {"lr": {"low": 1}}}]}, "SH104", "optimizer.0.args.lr"),
    "length of training": ({"epochs": [1, 2]}, "SH110", "epochs"),
    "length of training in steps": ({"steps": {"low": 10, "high": 20}}, "SH110", "steps"),
    "no high": ({LR: {"low": 1}}, "SH104", LR),
    "both ends alike": ({LR: {"low": 1, "high": 1}}, "SH106", f"{LR}.high"),
    "no number": ({LR: {"low": float("nan"), "high": 1}}, "SH105", f"{LR}.low"),
    "larger than any float": ({LR: {"low": 1, "high": 10**400}}, "SH105", f"{LR}.high"),
    "a step of nothing": ({LR: {"low": 1, "high": 9, "step": 0}}, "SH106", f"{LR}.step"),
    "a step that is text": ({LR: {"low": 1, "high": 9, "step": "a"}}, "SH105", f"{LR}.step"),
    "number of seeds": ({"seeds": [1, 3]}, "SH110", "seeds"),
    "a field of the search": ({"search.slots": [1, 2]}, "SH106", "search.slots"),
    "tied values that are no list": ({"loss, clip.norm": {"low": 1, "high": 2}}, "SH105", "loss, clip.norm"),
    "no choices inside": ({"model": [{"name": "Net", "args": {"a": {"choose": []}}}]}, "SH106", "model.0.args.a"),
    "set twice by a tied key": ({f"{LR}, batch_size": [[0.1, 8]], LR: [1, 2]}, "SH107", LR),
}
POPULATION = {"space": {LR: {"low": 1e-4, "high": 0.1}}}
BAD_SEARCHES = {
    "cmaes of several metrics": (
        {"space": POPULATION["space"], "policy": {"sampler": "cmaes"}, "metric": ["accuracy", "loss"]},
        "SH110",
        "policy.sampler",
    ),
    "a grid that is too large": (
        {"space": {"batch_size": {"low": 1, "high": 400}, "lanes": {"low": 1, "high": 400}}, "policy": GRID},
        "SH106",
        "space",
    ),
    "population by the model": (
        POPULATION | {"policy": {"kind": "population", "sampler": "gp"}},
        "SH110",
        "policy.sampler",
    ),
    "population repeated": (POPULATION | {"policy": "population", "repeat": 3}, "SH110", "repeat"),
    "population of several metrics": (
        POPULATION | {"policy": "population", "metric": ["accuracy", "loss"]},
        "SH110",
        "metric",
    ),
    "population of conditions": (
        {"space": {"model.args": [{"a": {"low": 1, "high": 2}}, {"a": 3}]}, "policy": "population"},
        "SH110",
        "space.model.args",
    ),
    "population of seeds": (POPULATION | {"policy": "population", "seeds": 2}, "SH110", "policy.kind"),
    "repeat and seeds": ({"repeat": 2, "seeds": 2}, "SH107", "repeat"),
    "repeat of a searched seed": ({"space": {"seed": [1, 2]}, "repeat": 2}, "SH107", "space.seed"),
    "no sampler of Optuna": ({"policy": {"sampler": "optuna:"}}, "SH106", "policy.sampler"),
    "slots": ({"slots": 0}, "SH106", "slots"),
    "factor": ({"policy": {"factor": 1}}, "SH106", "policy.factor"),
    "size of a population": (POPULATION | {"policy": {"kind": "population", "size": 1}}, "SH106", "policy.size"),
    "start between choices": ({"start": [{LR: 5.0}]}, "SH106", f"start.0.{LR}"),
    "sampler": ({"policy": {"sampler": "gpp"}}, "SH106", "policy.sampler"),
    "arguments": ({"policy": {"sampler": {"name": "gp", "args": {"a": 1}}}}, "SH107", "policy.sampler.args"),
    "grid of reals": ({"policy": {"sampler": "grid"}}, "SH110", f"space.{LR}"),
    "cmaes of choices": ({"policy": {"sampler": "cmaes"}}, "SH110", "policy.sampler"),
    "metric": ({"metric": "acuracy"}, "SH106", "metric.0"),
    "metric twice": ({"metric": ["loss", "loss"]}, "SH108", "metric.1"),
    "metrics without training": ({"metric": "parameters"}, "SH106", "metric"),
    "constraint": ({"constraints": ["weight <= 3"]}, "SH106", "constraints.0"),
    "constraint text": ({"constraints": ["size < 3"]}, "SH106", "constraints.0"),
    "constraint without a bound": ({"constraints": [{"metric": "size"}]}, "SH107", "constraints.0.least"),
    "constraint that nothing keeps": (
        {"constraints": [{"metric": "size", "least": 5, "most": 1}]},
        "SH107",
        "constraints.0.least",
    ),
    "empty space": ({"space": {}}, "SH106", "space"),
    "start key": ({"start": [{"lr": 1}]}, "SH103", "start.0.lr"),
    "start value": ({"start": [{"batch_size": 7}]}, "SH106", "start.0.batch_size"),
    "budget": ({"budget": "3 weeks"}, "SH106", "budget"),
    "keep": ({"keep": "much"}, "SH106", "keep"),
    "population of optimizers": ({"policy": "population"}, "SH110", "space.batch_size"),
    "population of schedules": (
        {"policy": "population", "space": {"schedule.args.gamma": [0.1, 0.5]}},
        "SH110",
        "space.schedule.args.gamma",
    ),
    "kind": ({"policy": "asha"}, "SH106", "policy.kind"),
}


def problems(search):
    with pytest.raises(ErrorGroup) as failure:
        job_of(search)
    return [(error.code, error.where) for error in failure.value.errors]


@pytest.mark.parametrize("case", BAD_SPACES)
def test_a_bad_space_names_the_field(case):
    space, code, place = BAD_SPACES[case]
    assert (code, f"search.space.{place}") in problems({"space": space})


@pytest.mark.parametrize("case", BAD_SEARCHES)
def test_a_bad_search_names_the_field(case):
    search, code, place = BAD_SEARCHES[case]
    assert (code, f"search.{place}") in problems(search)


@pytest.mark.parametrize("key", ["optimizer.args.lr", "optimizer"])
def test_the_line_of_a_key_whose_name_begins_like_a_list_of_the_space(key):
    """`optimizer` holds a list, so `args` of `optimizer.args.lr` is no place in it."""
    lines = ["search:", "  space:", "    optimizer: [SGD, {name: AdamW}]", "    optimizer.args.lr: {low: 1, high: 2}"]
    document = parse_document("\n".join(lines), name="job.yaml")
    line = 3 + ["optimizer", "optimizer.args.lr"].index(key)
    assert document.where(f"search.space.{key}") == f"job.yaml:{line} search.space.{key}"
    assert document.where("search.space.optimizer.1.name") == "job.yaml:3 search.space.optimizer.1.name"
    assert document.where("search.space.optimizer.0.name") == "job.yaml:3 search.space.optimizer.0"


def test_a_metric_of_the_job_does_not_hide_behind_a_fact():
    with pytest.raises(ErrorGroup) as failure:
        job_of({"metric": ["accuracy", "size"]}, metrics=["accuracy", {"name": "metrics.py:size"}])
    assert [(e.code, e.where) for e in failure.value.errors] == [("SH107", "search.metric.1")]


def test_folds_are_not_paused_by_hyperband():
    data = {"source": {"kind": "npz", "path": "x.npz"}, "split": {"kind": "kfold", "folds": 5}}
    with pytest.raises(ErrorGroup) as failure:
        job_of({"policy": "hyperband"}, data=data)
    assert [e.where for e in failure.value.errors] == ["search.policy.kind"]


def test_a_search_needs_validation_data():
    with pytest.raises(ErrorGroup) as failure:
        job_of({}, data={"source": {"kind": "npz", "path": "x.npz"}})
    assert "search" in [e.where for e in failure.value.errors]


def test_a_search_is_not_part_of_what_the_job_produces():
    job = job_of({})
    assert job.sha256() == job.model_copy(update={"search": None}).sha256()


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("40 trainings", BudgetConfig(trainings=40)),
        ("1 trial", BudgetConfig(trials=1)),
        ("1.5 hours", BudgetConfig(hours=1.5)),
        ("30 minutes", BudgetConfig(hours=0.5)),
    ],
)
def test_short_forms_of_a_budget(text, budget):
    assert BudgetConfig.model_validate(text) == budget


def test_sizes_and_signs():
    search = SearchConfig(space={"a": [1]}, keep="1.5 GB", metric=["accuracy", "loss", "parameters", "latency_ms"])
    assert search.keep_bytes == 1_500_000_000
    assert SearchConfig(space={"a": [1]}, keep="all").keep_bytes is None
    assert [objective.sign for objective in search.metric] == [1, -1, -1, -1]
