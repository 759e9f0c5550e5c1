"""Samplers: each finds the good region, proposes nothing twice, and is the same in every process."""

import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import shoal
from shoal.errors import ShoalError
from shoal.plan.search.importance import importance
from shoal.plan.search.pareto import crowding, fronts, hypervolume
from shoal.plan.search.samplers.gp import GpSampler, as_one, normal_scores
from shoal.plan.search.samplers.optuna import OWN_INSTEAD
from shoal.plan.search.trial import StretchResult, TrialShape
from tests.plan.search.simulated_search import job_of, play, played_digest, seeded

NUMBERS = {"optimizer.args.lr": {"low": 1e-5, "high": 0.1}, "clip.norm": {"low": 0.1, "high": 10.0}}
LEARNING = ("tpe", "gp", "cmaes", "nsga2")


def whole(changes):
    return TrialShape(1, 1.0, {"parameters": 1.0})


def bowl(stretch):
    rate, norm = math.log10(stretch.changes["optimizer.args.lr"]), math.log10(stretch.changes["clip.norm"])
    return StretchResult(({"accuracy": -((rate + 3) ** 2) - (norm - 0.5) ** 2},))


def search_with(sampler, trials):
    policy = {"kind": "full", "sampler": sampler}
    return job_of({"space": NUMBERS, "policy": policy, "budget": f"{trials} trials", "slots": 2})


def late_mean(sampler, trials=60):
    plan, _, _ = play(search_with(sampler, trials), shape=whole, result=bowl)
    keys = [t.point.key for t in plan.ledger.trials]
    assert len(keys) == len(set(keys)) == trials
    return np.mean([plan.ledger.curve_at(t)[0] for t in plan.ledger.trials[-15:]])


def test_samplers_that_learn_are_better_than_random_ones_in_the_end():
    random = late_mean("random")
    assert all(late_mean(sampler) > random / 2 for sampler in LEARNING)


def test_the_model_proposes_nothing_that_is_nearly_the_same():
    plan, _, _ = play(search_with("gp", 60), shape=whole, result=bowl)
    cubes = np.array([t.point.cube for t in plan.ledger.trials])
    gaps = np.abs(cubes[:, None] - cubes[None]).max(axis=2) + np.eye(len(cubes))
    assert gaps.min() > 0.009  # numbers are rounded


def test_sobol_points_fill_the_cube_evenly():
    plan, _, _ = play(search_with("sobol", 16), shape=whole, result=bowl)
    cubes = np.array([t.point.cube for t in plan.ledger.trials])
    for axis in cubes.T:
        assert sorted(np.floor(axis * 16).astype(int).tolist()) == list(range(16))


def test_a_grid_ends_when_every_point_was_tried():
    search = {
        "space": {"batch_size": [1, 2, 3], "lanes": {"low": 1, "high": 1 + 1}},
        "policy": {"kind": "full", "sampler": "grid"},
    }
    job = job_of(search, batch_size=4)
    plan, _, end = play(job, shape=whole, result=lambda s: StretchResult(({"accuracy": s.changes["batch_size"]},)))
    assert len(plan.ledger.trials) == 6
    assert end.why == "every configuration of the space was tried"
    assert plan.ledger.trials[end.best].point.changes["batch_size"] == 3


@pytest.mark.parametrize("sampler", ["random", "sobol", "tpe", "gp", "nsga2"])
def test_a_finite_space_is_used_up_by_every_sampler(sampler):
    search = {"space": {"batch_size": [1, 2, 3, 4], "lanes": [1, 2, 3]}, "policy": {"kind": "full", "sampler": sampler}}
    plan, _, _ = play(job_of(search), shape=whole, result=lambda s: StretchResult(({"accuracy": 1.0},)))
    assert len(plan.ledger.trials) == 12


def test_another_process_with_several_threads_decides_the_same():
    code = (
        "from tests.plan.search.test_samplers import *\n"
        "print(played_digest(search_with('gp', 24), shape=whole, result=bowl))"
    )
    here = played_digest(search_with("gp", 24), shape=whole, result=bowl)
    environment = {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2", "PYTHONHASHSEED": "7", "PATH": "/usr/bin:/bin"}
    there = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert there.stdout.strip() == here


def test_the_model_prefers_what_is_cheap():
    """The value does not depend on the axis that the cost depends on."""

    def value(stretch):
        return StretchResult(({"accuracy": -((math.log10(stretch.changes["optimizer.args.lr"]) + 3) ** 2)},))

    job = search_with("random", 24)
    plan, _, _ = play(job, shape=lambda changes: TrialShape(1, changes["clip.norm"]), result=value)

    def mean_place(*, cost_aware):
        sampler = GpSampler(cost_aware=cost_aware, random_share=0.0)
        return np.mean([sampler.propose(plan.ledger, number).cube[1] for number in range(100, 120)])

    assert mean_place(cost_aware=True) < mean_place(cost_aware=False) - 0.15


def two_metrics(sampler, seed, *, unit=1.0, trials=30):
    """Accuracy falls with the distance from a place, and the number of parameters grows along an axis."""
    search = {
        "space": {key: {**bounds, "log": True} for key, bounds in NUMBERS.items()},
        "policy": {"kind": "full", "sampler": sampler},
        "metric": ["accuracy", "parameters"],
        "budget": f"{trials} trials",
        "slots": 2,
    }

    def shape(changes):
        return TrialShape(1, 1.0, {"parameters": round(1000 * changes["clip.norm"]) * unit})

    return play(job_of(search, seed=seed), shape=shape, result=bowl)[0].ledger


def test_with_several_metrics_the_model_dominates_more_than_random_values():
    found = {sampler: two_metrics(sampler, seed=1) for sampler in ("gp", "random")}
    volumes = {
        sampler: hypervolume(np.array([ledger.values(t) for t in ledger.trials]), [-1.0, -3500.0])
        for sampler, ledger in found.items()
    }
    assert volumes["gp"] > 1.5 * volumes["random"], volumes


def test_the_unit_of_a_metric_changes_no_proposal():
    calm, scaled = ([t.point.key for t in two_metrics("gp", 0, unit=unit, trials=20).trials] for unit in (1.0, 1e5))
    assert calm == scaled


def test_metrics_as_one_number():
    table = np.array([[0.9, -5.0], [0.5, -1.0], [0.7, -3.0], [-1e308, 1e-3], [-math.inf, -1.0]])
    found = as_one(table, np.array([0.5, 0.5]))
    assert found[4] == -math.inf
    assert found[3] < found[[0, 1, 2]].min()  # it diverged, and hides nothing
    assert len({*found[:3].tolist()}) == 3
    constant = as_one(np.array([[0.1, 7.0], [0.2, 7.0]]), np.array([0.01, 0.99]))
    assert constant[1] == 0 > constant[0]
    assert as_one(np.array([[-math.inf, 1.0]]), np.array([0.5, 0.5])).tolist() == [-math.inf]


OPTUNA = ["optuna:TPESampler", "optuna:RandomSampler", {"name": "optuna:NSGAIISampler", "args": {"population_size": 6}}]


@pytest.mark.parametrize("sampler", OPTUNA)
def test_optunas_samplers_are_told_in_virtual_order(sampler):
    pytest.importorskip("optuna")
    job = search_with(sampler, 20)
    calm = played_digest(job, shape=whole, result=bowl)
    assert played_digest(job, workers=2, chance=seeded(5), cuts=[9, 15], shape=whole, result=bowl) == calm


@pytest.mark.parametrize("sampler", [*LEARNING, "optuna:TPESampler"])
def test_samplers_that_learn_propose_what_keeps_a_constraint(sampler):
    """The best values break it: a sampler that knows nothing of constraints would propose little else."""
    if ":" in sampler:
        pytest.importorskip("optuna")

    def result(stretch):
        (row,) = bowl(stretch).rows
        return StretchResult(({**row, "loss": math.log10(stretch.changes["optimizer.args.lr"])},))

    policy = {"kind": "full", "sampler": sampler}
    search = {"space": NUMBERS, "policy": policy, "budget": "60 trials", "slots": 2, "constraints": "loss <= -4"}
    log = {key: {**bounds, "log": True} for key, bounds in NUMBERS.items()}
    plan, _, end = play(job_of({**search, "space": log}), shape=whole, result=result)
    kept = [t.rows[0]["loss"] <= -4 for t in plan.ledger.trials]
    assert sum(kept[-20:]) >= 9, kept
    assert kept[end.best]


def test_optunas_genetic_sampler_learns_over_generations():
    """Although its study is made anew for every proposal."""
    pytest.importorskip("optuna")
    genetic = {"name": "optuna:NSGAIISampler", "args": {"population_size": 10}}
    assert late_mean(genetic, trials=100) > 0.75 * late_mean("random", trials=100)


def test_every_sampler_of_optuna_works_or_is_refused_with_its_field():
    optuna = pytest.importorskip("optuna")
    refused = {}
    for name in [name for name in dir(optuna.samplers) if name.endswith("Sampler") and name != "BaseSampler"]:
        try:
            play(search_with(f"optuna:{name}", 4), shape=whole, result=bowl)
        except ShoalError as failure:
            refused[name] = failure.where
    assert all(place.startswith("search.policy.sampler") for place in refused.values())
    assert set(refused) >= set(OWN_INSTEAD)
    assert not set(refused) & {"TPESampler", "RandomSampler", "NSGAIISampler", "NSGAIIISampler"}


HEAVY = ("torch", "optuna", "scipy", "sklearn", "pandas", "pyarrow", "matplotlib", "ray", "rich", "sqlite3")
"""They take longer to import than the whole room. SciPy is imported where a model or a test first needs it."""


def test_plan_driver_and_commands_import_nothing_heavy():
    code = (
        "import sys, shoal.plan.search.make, shoal.jobs.search.driver, shoal.jobs.search.summary, shoal.cli.search;"
        f"print([m for m in {HEAVY} if m in sys.modules], 'numpy' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["[]", "True"]


def test_one_module_alone_imports_optuna():
    modules = Path(shoal.__file__).parent.rglob("*.py")
    found = [file.name for file in modules if re.search(r"^\s*(import|from) optuna", file.read_text(), re.MULTILINE)]
    assert found == ["optuna.py"]


def test_fronts_crowding_and_volume():
    values = np.array([[1.0, 3.0], [2.0, 2.0], [3.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    assert fronts(values) == [[0, 1, 2], [3], [4]]
    assert crowding(values[:3]).tolist() == [np.inf, 2.0, np.inf]
    assert hypervolume(values, [0.0, 0.0]) == 6.0
    assert hypervolume(np.array([[1.0, 1.0, 1.0], [2.0, 0.5, 0.5]]), [0.0, 0.0, 0.0]) == 1.25


def test_importance_needs_enough_trials():
    plan, _, _ = play(search_with("random", 4), shape=whole, result=bowl)
    assert importance(plan.ledger) == {}


def test_how_bad_a_bad_value_is_does_not_change_what_the_model_sees():
    good = [0.9, 0.91, 0.92, 0.92]
    seen = [normal_scores(np.array([worst, *good])) for worst in (0.5, -1e30, -math.inf)]
    assert all(np.array_equal(seen[0], scores) for scores in seen)
    assert seen[0][3] == seen[0][4]
    assert np.all(np.diff(seen[0][:4]) > 0)
