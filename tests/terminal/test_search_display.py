"""A search as a person sees it: the live table, plain lines, `shoal search show`. Its rows are played, not trained."""

import io

import pytest
from rich.console import Console

from shoal.events import RunState
from shoal.jobs.search.driver import SearchProgress
from shoal.jobs.search.journal import DecidedRow, Journal, ShapeRow, StartedRow, ToldRow
from shoal.jobs.search.search_dir import create
from shoal.jobs.search.stretches import StretchRuns
from shoal.jobs.search.summary import read_search
from shoal.jobs.search.table import SearchTable
from shoal.terminal.search_live import LiveSearchDisplay, PlainSearchDisplay, head_line, row_line
from shoal.terminal.search_report import print_search
from tests.jobs.search.test_replay import WHOLE, continued, search_job


def screen(*, terminal=False):
    return Console(file=io.StringIO(), width=150, force_terminal=terminal, color_system=None)


def progress_of(paths, job, rows, *, elapsed_s=30.0):
    """As the driver tells it: the last decision without a result is under way, on two workers."""
    table, runs = SearchTable.of(rows), StretchRuns(paths, None, 2)
    undone = [d for number, d in table.decisions.items() if number not in table.told]
    shapes = {row.trial: row for row in rows if row.kind == "shape"}
    for decided in undone:
        runs.add(decided.stretch, job, shapes[decided.trial].model_copy(update={"boundaries": list(range(4, 40, 4))}))
        run = runs.undone[decided.number]
        run.handle, run.state = object(), RunState()
        run.state.step = 7
    return SearchProgress(paths, job, rows, table, runs, 1, elapsed_s)


def test_the_live_table_has_value_step_state_workers_budget_and_eta(tmp_path):
    job = search_job()
    paths = create(job, tmp_path)
    count = max(i for i, row in enumerate(WHOLE) if isinstance(row, DecidedRow)) + 1
    progress = progress_of(paths, job, [StartedRow(), *WHOLE[:count]])
    head = head_line(progress)
    assert f"{len(progress.table.trials)} trials" in head
    assert "0/2 workers" in head
    assert f"/{job.search.budget.trainings:g} trainings" in head
    done = progress.table.spent / job.search.budget.trainings
    assert abs(progress.eta_s - 30 * (1 - done) / done) < 1e-6
    shown = screen(terminal=True)
    display = LiveSearchDisplay(shown)
    display.on_update(progress)
    shown.print(display._render())
    lines = [line.split() for line in shown.file.getvalue().splitlines()]
    assert lines[1] == ["trial", "accuracy", "step", "state", "workers", "values"]
    running = {run.stretch.trial for run in progress.runs.active}
    assert {int(line[0]) for line in lines[2:] if "running" in line} == running
    assert all(line[2] == "7/36" for line in lines[2:] if "running" in line)


@pytest.mark.parametrize(
    ("budget", "part"),
    [
        ("40 trainings", 5 / 40),
        ("20 trials", 10 / 20),
        ({"trials": 20, "trainings": 8}, 5 / 8),
        ({"trainings": 40, "hours": 1 / 60}, 1 / 2),
    ],
)
def test_the_eta_is_that_of_the_budget_which_ends_first(budget, part, tmp_path):
    """Ten trials have run half of their training, in two stretches each."""
    job, rows = search_job(budget=budget), []
    for trial in range(10):
        rows.append(ShapeRow(trial=trial, changes={}, units=4, cost=1.0))
        for start in (0, 1):
            number = 2 * trial + start
            ends = {"slot": 0, "begins": 0.0, "ends": 1.0}
            rows.append(DecidedRow(number=number, trial=trial, changes={}, start=start, end=start + 1, **ends))
            rows.append(ToldRow(number=number, rows=[{"accuracy": 0.5}]))
    progress = progress_of(create(job, tmp_path), job, rows, elapsed_s=30.0)
    assert progress.eta_s == pytest.approx(30 * (1 - part) / part)


def test_plain_lines_tell_each_row_once_and_none_of_an_earlier_driver(tmp_path):
    job = search_job()
    paths, rows, shown = create(job, tmp_path), [StartedRow(), *WHOLE], screen()
    display = PlainSearchDisplay(shown)
    earlier = SearchProgress(paths, job, rows[:6], SearchTable.of(rows[:6]), StretchRuns(paths, None, 2), 6, 1.0)
    display.on_update(earlier)
    assert shown.file.getvalue() == ""
    display.on_update(progress_of(paths, job, rows))
    display.on_update(progress_of(paths, job, rows))
    lines = shown.file.getvalue().splitlines()
    assert len(lines) == sum(isinstance(row, DecidedRow | ToldRow) for row in rows[6:])
    assert lines[-1].startswith(f"{paths.name}: trial ")
    assert "best: trial" in lines[-1]


def test_plain_lines_tell_each_row_as_the_search_was_then(tmp_path):
    """Several rows may come between two looks at the journal. Trial 0 ends before its last unit."""
    job, ends = search_job(), {"slot": 0, "begins": 0.0, "ends": 1.0}
    rows = [
        ShapeRow(trial=0, changes={}, units=4, cost=1.0),
        ShapeRow(trial=1, changes={}, units=4, cost=1.0),
        DecidedRow(number=0, trial=0, changes={}, start=0, end=1, **ends),
        DecidedRow(number=1, trial=1, changes={}, start=0, end=1, **ends),
        ToldRow(number=0, rows=[{"accuracy": 0.5}]),
        DecidedRow(number=2, trial=0, changes={}, start=1, end=4, **ends),
        ToldRow(number=1, rows=[{"accuracy": 0.6}]),
        ToldRow(number=2, rows=[{"accuracy": 0.7}]),
    ]
    shown = screen()
    display = PlainSearchDisplay(shown)
    paths = create(job, tmp_path)
    display.on_update(progress_of(paths, job, rows[:3]))
    display.on_update(progress_of(paths, job, rows))
    told = [line.partition(": ")[2] for line in shown.file.getvalue().splitlines() if "best" in line]
    assert told == [
        "trial 0 is at 1: accuracy 0.5000; best: trial 0 0.5000",
        "trial 1 is at 1: accuracy 0.6000; best: trial 1 0.6000",
        "trial 0 is at 2: accuracy 0.7000; best: trial 0 0.7000",
    ]


def test_a_trial_that_a_fact_refuses_is_told(tmp_path):
    job = search_job(constraints=["parameters <= 50"])
    rows = [ShapeRow(trial=0, changes={"batch_size": 16}, units=4, cost=1.0, facts={"parameters": 60.0})]
    progress = progress_of(create(job, tmp_path), job, rows)
    assert row_line(progress, rows[0]) == "trial 0 is not trained, it breaks a constraint: batch_size 16"


def test_plain_lines_tell_the_new_values_of_a_copy(tmp_path):
    job = search_job()
    ends = {"slot": 0, "begins": 0.0, "ends": 1.0}
    rows = [
        ShapeRow(trial=0, changes={"batch_size": 16}, units=4, cost=1.0),
        DecidedRow(number=0, trial=0, changes={"batch_size": 16}, start=0, end=2, **ends),
        ToldRow(number=0, rows=[{"accuracy": 0.9}] * 2),
        ShapeRow(trial=1, changes={"batch_size": 32}, units=4, cost=1.0),
        DecidedRow(number=1, trial=1, changes={"batch_size": 32}, start=2, end=4, copy_of=(0, 2), **ends),
    ]
    progress = progress_of(create(job, tmp_path), job, rows)
    assert row_line(progress, rows[-1]) == "trial 1 begins as a copy of trial 0 at 2: batch_size 32; to 4 of 4"


def test_plain_lines_tell_the_mean_over_seeds_of_the_best_trial_too(tmp_path):
    job = search_job(seeds=2)
    rows = [
        ShapeRow(trial=0, changes={}, units=2, cost=1.0),
        DecidedRow(number=0, slot=0, trial=0, changes={}, start=0, end=2, begins=0.0, ends=1.0),
        ToldRow(number=0, rows=[{"accuracy": 0.9}, {"accuracy": 0.5}]),
    ]
    progress = progress_of(create(job, tmp_path), job, rows)
    assert row_line(progress, rows[-1]) == "trial 0 is at 2: accuracy 0.7000; best: trial 0 0.7000"


def test_show_draws_history_importance_and_coordinates(tmp_path):
    job = search_job(budget="20 trainings")
    paths = create(job, tmp_path)
    journal = Journal(paths.journal)
    for row in [StartedRow(job_sha256=job.sha256()), *continued(job, [])]:
        journal.append(row)
    journal.close()
    found, shown = read_search(paths), screen()
    print_search(shown, found)
    text = shown.file.getvalue()
    for part in ("best accuracy over trainings", "importance", "parallel coordinates", "optimizer.args.lr"):
        assert part in text
    best = found.best
    assert text.splitlines()[2].split()[0] == str(best.number)
