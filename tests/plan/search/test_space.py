"""The unit cube: every place is a job, numbers are readable, and suggestions find their place."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ErrorGroup
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


def test_a_space_that_makes_a_bad_job_names_the_dimension():
    with pytest.raises(ErrorGroup) as failure:
        check_space(job_of({"space": {"batch_size": [4, -2], "optimizer.arg.lr": [0.1, 0.2]}}), check_names=False)
    assert [e.where for e in failure.value.errors] == ["search.space.optimizer.arg.lr", "search.space.batch_size"]
