"""Simulated searches on small tables: what is counted, and that any table of the format is taken."""

import json
import sys
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from benchmarks.search import __main__ as searching
from benchmarks.search.disk import Pause, disk, least_again
from benchmarks.search.price import price
from benchmarks.search.rivals import RayAsha
from benchmarks.search.simulate import Conditions, default_search, earlier_values, simulate
from benchmarks.search.tables import load_table, load_tables

ROWS, POINTS = 60, 9


def curves(*, diverged=0.0, seed=0):
    """Errors that fall with training; the best configuration is near the middle of the cube."""
    generator = np.random.default_rng(seed)
    cube = generator.random((ROWS, 3))
    final = 0.1 + ((cube - 0.5) ** 2).sum(axis=1)
    error = final[:, None] + 1 / (1 + np.arange(POINTS))[None]
    error[generator.random(ROWS) < diverged, 4:] = np.nan
    return cube, error


def write(folder, name="one.npz", **more):
    cube, error = curves()
    np.savez(folder / name, **({"u": cube, "y": error} | more))
    return folder / name


def run(monkeypatch, capsys, folder, *arguments):
    monkeypatch.setattr(sys, "argv", ["search", "simulate", "--tables", str(folder), "--json", *arguments])
    searching.main()
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("order", ["virtual", "clock"])
def test_the_command_prints_regret_and_standard_errors(order, tmp_path, monkeypatch, capsys):
    write(tmp_path)
    (tmp_path / "inner").mkdir()
    write(tmp_path / "inner", "two.npz", t=np.cumsum(np.ones((ROWS, POINTS)), axis=1), names=np.array(["a"] * 3))
    asked = ["--policy", "shoal", "--order", order, "--workers", "4", "--seeds", "1"]
    (row,) = run(monkeypatch, capsys, tmp_path, *asked)
    assert (row["policy"], row["order"], row["workers"], row["runs"]) == ("shoal", order, 4, 2)
    regrets = [row[f"regret at {when}"] for when in ("1", "2.5", "5", "10")]
    assert regrets == sorted(regrets, reverse=True)
    assert regrets[-1] < 0.5
    assert all(row[f"± at {when}"] >= 0 for when in ("1", "2.5", "5", "10"))


def test_other_policies_are_rivals_in_the_order_of_the_clock(tmp_path, monkeypatch, capsys):
    write(tmp_path)
    rows = run(monkeypatch, capsys, tmp_path, "--policy", "asha", "--policy", "random", "--seeds", "2", "--time", "5")
    assert [(row["policy"], row["order"]) for row in rows] == [("asha", "clock"), ("random", "clock")]
    assert "regret at 10" not in rows[0]


@pytest.mark.parametrize("policy", ["tpe", "tpe+hyperband", "tpe+asha"])
def test_optuna_is_run_on_the_same_tables(policy, tmp_path, monkeypatch, capsys):
    pytest.importorskip("optuna")
    write(tmp_path)
    (row,) = run(monkeypatch, capsys, tmp_path, "--policy", policy, "--seeds", "1", "--time", "2.5")
    assert (row["policy"], row["order"]) == (policy, "clock")
    assert 0 <= row["regret at 2.5"] <= row["regret at 1"]


@pytest.mark.ray
@pytest.mark.parametrize("epochs", [9, 16, 51])
def test_the_port_of_rays_asha_decides_as_ray_does(epochs):
    """Two hundred trials, up to six at once, whose errors are often equal."""
    schedulers = pytest.importorskip("ray.tune.schedulers")
    ray = schedulers.AsyncHyperBandScheduler(metric="error", mode="min", max_t=epochs)
    port, generator = RayAsha(3, 0, epochs=epochs), np.random.default_rng(epochs)
    waiting = [SimpleNamespace(trial_id=str(n), epoch=0) for n in range(200)]
    running, stops, ends = [], 0, 0
    while waiting or running:
        while waiting and len(running) < 6:
            running.append(waiting.pop())
            ray.on_trial_add(None, running[-1])
        trial = running[generator.integers(len(running))]
        trial.epoch += 1
        error = round(float(generator.random()) / trial.epoch, 2)
        result = {"training_iteration": trial.epoch, "error": error}
        goes_on = port.report(trial, trial.epoch, error) and trial.epoch < epochs
        assert (ray.on_trial_result(None, trial, result) == schedulers.TrialScheduler.CONTINUE) == goes_on
        if not goes_on:
            ray.on_trial_complete(None, trial, result)
            running.remove(trial)
            stops, ends = stops + (trial.epoch < epochs), ends + (trial.epoch == epochs)
    assert stops > ends > 0


def test_the_first_point_is_left_out_and_regret_is_scaled(tmp_path):
    table = load_table(write(tmp_path))
    assert table.error.shape == (ROWS, POINTS - 1)
    assert table.regret(table.best) == 0 == table.regret(table.best - 1)
    assert table.regret(table.median) == pytest.approx(1)
    assert np.isfinite(table.regret(np.inf))  # nothing was seen yet


@pytest.mark.parametrize("diverged", [0.3, 0.8])
def test_diverged_curves_and_unknown_times_are_no_obstacle(diverged, tmp_path):
    cube, error = curves(diverged=diverged)
    seconds = np.where(np.isnan(error), np.nan, np.cumsum(np.ones_like(error), axis=1))
    np.savez(tmp_path / "one.npz", x=np.exp(9 * cube), y=error, t=seconds)
    found = simulate(load_tables(tmp_path), "shoal", Conditions(horizon=5), seeds=1)
    assert all(np.isfinite(value) for key, value in found.items() if key.startswith("regret"))


@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        ({"y": np.ones((4, 3))}, "`u` or `x`"),
        ({"u": np.ones((4, 2))}, "`y`"),
        ({"u": np.ones((3, 2)), "y": np.ones((4, 3))}, "as many rows"),
        ({"u": np.ones((4, 2)), "y": np.ones((4, 3)), "t": np.ones((4, 2))}, "`t`"),
        ({"u": np.ones((4, 2)), "y": np.full((4, 3), np.nan)}, "diverged"),
        ({"u": np.full((4, 2), 1.5), "y": np.ones((4, 3))}, "outside of 0 to 1"),
        ({"u": np.full((4, 2), np.nan), "y": np.ones((4, 3))}, "missing or outside"),
        ({"u": np.ones((4, 0)), "y": np.ones((4, 3))}, "no column"),
        ({"x": np.full((4, 2), np.nan), "y": np.ones((4, 3))}, "missing"),
        ({"u": np.ones((4, 2)), "y": np.full((4, 3), "low")}, "arrays of numbers"),
        ({"u": np.ones((4, 2)), "y": np.array([[1, None]] * 4)}, "arrays of numbers"),
    ],
)
def test_a_file_that_is_no_table_is_named(arrays, told, tmp_path):
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(SystemExit, match=f"bad.npz.*{told}"):
        load_tables(tmp_path)


@pytest.mark.parametrize("keep_bytes", [0, 200])
def test_a_damaged_file_is_named(keep_bytes, tmp_path):
    whole = write(tmp_path)
    whole.write_bytes(whole.read_bytes()[:keep_bytes])
    with pytest.raises(SystemExit, match=r"one\.npz.*arrays of numbers"):
        load_tables(tmp_path)


def test_a_value_that_is_missing_between_others_is_no_divergence(tmp_path):
    hole = np.nan
    error = np.array([[9, hole, 7, hole, hole, 4], [9, 8, 7, hole, hole, hole], [hole] * 6])
    table = load_table(write(tmp_path, u=np.zeros((3, 1)), y=error))
    assert np.array_equal(table.error, [[7, 7, 7, 7, 4], [8, 7, hole, hole, hole], [hole] * 5], equal_nan=True)


@pytest.mark.parametrize(("points", "rows"), [(2, 60), (2, 3), (2, 1), (120, 40)])
def test_tables_of_any_size_are_searched(points, rows, tmp_path):
    """One fidelity, fewer rows than workers ask for, a single one, many fidelities."""
    cube, _ = curves()
    error = cube[:rows, :1] + 1 / (1 + np.arange(points))[None]
    found = simulate([load_table(write(tmp_path, u=cube[:rows], y=error))], "shoal", Conditions(horizon=2.5), seeds=1)
    assert 0 <= found["regret at 2.5"] <= found["regret at 1"]


def test_a_warm_search_begins_with_what_searches_on_other_tables_found(tmp_path):
    """Two tables with the same best place."""
    cube, _ = curves()
    for name in ("one", "two"):
        error = ((cube - 0.5) ** 2).sum(axis=1)[:, None] + 1 / (1 + np.arange(POINTS))[None]
        np.savez(tmp_path / f"{name}.npz", u=cube, y=error)
    tables = load_tables(tmp_path)
    first = earlier_values(tables, tables[0], 1, seed=0)
    places = [tuple(one.values()) for one in first]
    assert len(places) == 8
    assert tuple(cube[np.argmin(((cube - 0.5) ** 2).sum(axis=1))]) in places
    plan = default_search(tables[0], slots=1, order="virtual", seed=0, first=first)
    assert [point.cube for point in plan.suggestions] == places
    found = simulate(tables, "shoal", Conditions(horizon=2.5, warm=1), seeds=1)
    assert (found["warm"], found["regret at 2.5"]) == (1, 0.0)
    assert found["suggestions alone at 1"] >= found["suggestions alone at their ends"]
    with pytest.raises(SystemExit, match="there are 1 other tables"):
        earlier_values(tables, tables[0], 2, seed=0)


def test_equal_values_of_a_column_share_their_place(tmp_path):
    values = np.array([[5.0, 1.0], [5.0, 2.0], [9.0, 3.0], [5.0, 4.0]])
    np.savez(tmp_path / "one.npz", x=values, y=np.ones((4, 3)))
    table = load_table(tmp_path / "one.npz")
    assert table.cube[:, 0].tolist() == [0.375, 0.375, 0.875, 0.375]
    assert table.cube[:, 1].tolist() == [0.125, 0.375, 0.625, 0.875]


def test_few_checkpoints_cost_work_and_change_no_decision(tmp_path):
    cube, error = curves()
    np.savez(tmp_path / "one.npz", u=cube, y=error)
    asked = {"workers": 4, "seeds": 1, "horizon": 5.0}
    tight, plenty = disk(load_tables(tmp_path), shares=[0.05, 1.0], **asked)
    assert 1 <= tight["kept"] < plenty["kept"]
    assert tight["more work"] > 0 == plenty["more work"] == plenty["retrained"]
    assert 0 < tight["at least"] <= tight["more work"]
    assert plenty["at least"] == 0
    assert tight["same"] is True


def test_the_least_work_is_that_of_the_best_choice():
    pauses = [Pause(0, 1.0, 3), Pause(1, 5.0, 4), Pause(2, 2.0, 3), Pause(3, 3.0, 4), Pause(4, 9.0)]
    chosen = [[p for p, is_kept in zip(pauses, choice, strict=True) if is_kept] for choice in product([0, 1], repeat=5)]
    for most in (1, 2, 3):
        fits = [
            kept
            for kept in chosen
            if all(sum(p.number <= at < (p.resumed or 5) for p in kept if p.resumed) <= most for at in range(5))
        ]
        again = [sum(p.cost for p in pauses if p.resumed and p not in kept) for kept in fits]
        assert least_again(pauses, most) == pytest.approx(min(again))


def test_idle_workers_help_only_as_far_as_a_trial_has_lanes(tmp_path):
    tables = load_tables(write(tmp_path).parent)
    done = {row["way"]: row for row in price(tables, workers=16, seeds=1)}
    assert done["virtual, nobody helps"]["busy"] < done["virtual, idle workers help"]["busy"] <= 1
    found = [simulate(tables, "shoal", Conditions(horizon=2.5, lanes=n), seeds=1) for n in (1, 8)]
    assert found[0]["lanes"] == 1
    assert "lanes" not in found[1]
