"""The unit cube: every place is a job, numbers are readable, and suggestions find their place."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ErrorGroup
from shoal.plan.search.make import make_search, own_values
from shoal.plan.search.space import Space
from shoal.spec.search.trial_job import check_space, make_trial_job
from tests.plan.search.simulated_search import SPACE, job_of

RICH = {
    **SPACE,
    "clip.norm": {"low": 0.5, "high": 2.0, "step": 0.25},
    "lanes": {"low": 1, "high": 8},
    "loss, precision": [["CrossEntropyLoss", "float32"], ["NLLLoss", "bf16"]],
}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=7, max_size=7))
def test_every_place_is_a_job_and_keeps_its_place(cube):
    space = Space(RICH)
    assert len(space.axes) == len(cube)
    point = space.settle(cube)
    make_trial_job(job_of({"space": RICH}), point.changes, check_names=False)
    again = space.settle(point.cube)
    assert again.changes == point.changes
    assert float(f"{point.changes['optimizer.args.lr']:.4g}") == point.changes["optimizer.args.lr"]
    near = space.canonical(np.array([cube]))[0]
    assert space.settle(near).changes == point.changes


def test_sections_stand_before_the_fields_inside_them():
    changes = Space(SPACE).settle([0.5] * 4).changes
    assert list(changes) == ["batch_size", "optimizer", "optimizer.args.lr"]


def test_an_axis_inside_another_option_is_not_active():
    space = Space(SPACE)
    adam, sgd = [0.5, 0.5, 0.1, 0.9], [0.5, 0.5, 0.9, 0.9]
    assert space.active(adam) == [True] * 4
    assert space.active(sgd) == [True, True, True, False]
    assert space.settle(sgd).cube[3] == 0.5
    assert space.settle(sgd).changes["optimizer"] == {"name": "SGD"}


@pytest.mark.parametrize(
    ("given_range", "is_log"),
    [
        ({"low": 1e-5, "high": 1e-1}, True),
        ({"low": 1, "high": 99}, False),
        ({"low": 0, "high": 1e9}, False),
        ({"low": 1, "high": 2, "log": True}, True),
        ({"low": 1, "high": 1000, "step": 10}, False),
    ],
)
def test_logarithms_are_guessed(given_range, is_log):
    assert Space({"lanes": given_range}).axes[0].values.log is is_log


def test_whole_numbers_and_steps_are_reached_evenly():
    space = Space({"lanes": {"low": 1, "high": 4}})
    found = [space.settle([place]).changes["lanes"] for place in (np.arange(400) + 0.5) / 400]
    assert {n: found.count(n) for n in (1, 2, 3, 4)} == {1: 100, 2: 100, 3: 100, 4: 100}


def test_all_configurations_of_a_finite_space_are_walked_once():
    space = Space(
        {
            "lanes": {"low": 1, "high": 3},
            "optimizer": [{"name": "SGD", "args": {"nesterov": {"choose": [True, False]}}}, "Adam"],
        }
    )
    keys = [point.key for point in space.walk()]
    assert len(keys) == len(set(keys)) == space.size == 9


def test_a_suggestion_keeps_the_jobs_own_values_elsewhere():
    space = Space(SPACE, defaults={"batch_size": 128, "optimizer.args.lr": 7.0})
    point = space.suggest({"optimizer": {"name": "AdamW", "args": {"weight_decay": 0.01}}})
    assert point.changes["batch_size"] == 128
    assert point.changes["optimizer.args.lr"] == 0.001  # the middle: the job's own value is outside
    assert math.isclose(point.cube[3], 0.8, abs_tol=1e-9)


OWN = [
    ({"optimizer": [{"name": "SGD"}, {"name": "AdamW"}]}, {"name": "AdamW", "args": {"lr": 0.01}}, {"name": "AdamW"}),
    (
        {"optimizer": [{"name": "AdamW"}, {"name": "AdamW", "args": {"lr": {"low": 0.001, "high": 0.1}}}]},
        {"name": "AdamW", "args": {"lr": 0.01, "eps": 1e-9}},
        {"name": "AdamW", "args": {"lr": 0.01}},
    ),
    ({"optimizer": ["SGD", "AdamW"]}, "AdamW", "AdamW"),
    ({"clip": [{"norm": 1.0}, None]}, None, None),
    ({"loss, epochs": [["MSELoss", 5], ["CrossEntropyLoss", 7]]}, 7, ["CrossEntropyLoss", 7]),
    ({"optimizer": [{"name": "SGD"}, {"name": "Adam"}]}, {"name": "AdamW"}, ...),
    ({"optimizer.args.lr": {"low": 0.1, "high": 0.2}}, 0.3, ...),
]


@pytest.mark.parametrize(("space", "own", "found"), OWN)
def test_the_own_values_of_a_job_are_found_in_the_words_of_the_space(space, own, found):
    (key,) = space
    fields = {key.rpartition(" ")[2].partition(".")[0]: own} if "args" not in key else {}
    fields |= {"optimizer": {"name": "SGD", "args": {"lr": own}}} if "args" in key else {}
    policy = {"kind": "full", "sampler": "random"}
    job = job_of({"space": space, "policy": policy}, **fields)
    assert own_values(job, space).get(key, ...) == found
    if found is not ...:
        assert make_search(job_of({"space": space, "policy": policy, "start": [{}]}, **fields)).suggestions[
            0
        ].changes == (dict(zip(("loss", "epochs"), found, strict=True)) if "," in key else {key: found})


FOLDS = {"source": {"kind": "npz", "path": "x.npz"}, "split": {"kind": "kfold", "folds": 5}}
LATER = {
    "folds": ({"data.split.folds": [5, 3]}, {"data": FOLDS}, "SH110"),
    "kinds of splits": (
        {"data.split": [{"kind": "holdout", "validation": 0.2}, {"kind": "kfold", "folds": 3}]},
        {},
        "SH110",
    ),
    "planned sync": ({"sync": ["lanes", "auto"]}, {}, "SH110"),
    "a whole number between": ({"batch_size": {"low": 1.0, "high": 64.0}}, {}, "SH105"),
    "a whole number between, by logarithm": ({"batch_size": {"low": 1.0, "high": 10000.0}}, {}, "SH105"),
    "a whole number between, in steps": ({"batch_size": {"low": 1.0, "high": 3.0, "step": 0.5}}, {}, "SH105"),
}


@pytest.mark.parametrize("case", LATER)
def test_what_only_the_jobs_of_trials_show_is_refused_before_anything_starts(case):
    space, fields, code = LATER[case]
    (key,) = space
    with pytest.raises(ErrorGroup) as failure:
        check_space(job_of({"space": space, "policy": {"kind": "full"}}, **fields), check_names=False)
    assert {(e.code, e.where) for e in failure.value.errors} == {(code, f"search.space.{key}")}


def test_splits_with_the_same_number_of_folds_are_searched():
    splits = [{"kind": "kfold", "folds": 5}, {"kind": "kfold", "folds": 5, "shuffle": False}]
    check_space(job_of({"space": {"data.split": splits}}, data=FOLDS), check_names=False)


def test_steps_that_are_whole_are_searched():
    check_space(job_of({"space": {"batch_size": {"low": 1.0, "high": 9.0, "step": 2.0}}}), check_names=False)


def test_a_space_that_makes_a_bad_job_names_the_dimension():
    with pytest.raises(ErrorGroup) as failure:
        check_space(job_of({"space": {"batch_size": [4, -2], "optimizer.arg.lr": [0.1, 0.2]}}), check_names=False)
    assert [e.where for e in failure.value.errors] == ["search.space.optimizer.arg.lr", "search.space.batch_size"]
