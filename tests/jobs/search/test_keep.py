"""Which checkpoints are forgotten when there is no room for all."""

import pytest

from shoal.jobs.search.journal import DecidedRow, EndedRow, ForgottenRow, ShapeRow, ToldRow
from shoal.jobs.search.keep import Keeper
from shoal.jobs.search.receipt import make_receipt
from shoal.jobs.search.search_dir import create
from shoal.jobs.search.table import SearchTable

UNITS = 4
TRIALS = {0: (4, 0.9), 1: (1, 0.2), 2: (4, 0.5), 3: (2, 0.6), 4: (1, 0.3), 5: (1, None)}
"""(unit reached, accuracy) by trial: 0 and 2 are complete, 5 has failed, the others are paused."""


@pytest.mark.parametrize(
    ("room", "kept"),
    [(5, [0, 1, 2, 3, 4]), (4, [0, 1, 3, 4]), (3, [1, 3, 4]), (1, [3]), (0, [])],
)
def test_failed_trials_are_forgotten_first_then_complete_ones_then_the_worst(room, kept, make, job_dir):
    job = make(search={"keep": f"{room} MB"})
    paths, rows = create(job, job_dir / "runs"), []
    for number, (unit, accuracy) in TRIALS.items():
        file = paths.trial(number).checkpoints / "state"
        file.parent.mkdir(parents=True)
        file.write_bytes(bytes([number]) * 1_000_000)
        failed = {"failure": "it failed"} if accuracy is None else {"rows": [{"accuracy": accuracy}] * unit}
        rows += [
            ShapeRow(trial=number, changes={}, units=UNITS, cost=1.0),
            DecidedRow(number=number, slot=0, trial=number, changes={}, start=0, end=unit, begins=0.0, ends=1.0),
            ToldRow(number=number, **failed),
        ]
    forgotten = list(Keeper(job, paths).make_room(SearchTable.of(rows), busy=()))
    assert sorted(row.trial for row in forgotten) == [n for n in TRIALS if n not in kept]
    assert all(isinstance(row, ForgottenRow) for row in forgotten)
    assert [n for n in TRIALS if (paths.trial(n).checkpoints / "state").exists()] == kept


def test_trials_under_way_keep_theirs(make, job_dir):
    job = make(search={"keep": "0 MB"})
    paths = create(job, job_dir / "runs")
    file = paths.trial(0).checkpoints / "state"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"x")
    rows = [
        ShapeRow(trial=0, changes={}, units=UNITS, cost=1.0),
        DecidedRow(number=0, slot=0, trial=0, changes={}, start=0, end=1, begins=0.0, ends=1.0),
        ToldRow(number=0, rows=[{"accuracy": 0.5}]),
    ]
    keeper = Keeper(job, paths)
    assert list(keeper.make_room(SearchTable.of(rows), busy={0})) == []
    assert file.exists()
    assert [row.trial for row in keeper.make_room(SearchTable.of(rows), busy=())] == [0]
    assert not file.exists()


def test_what_is_likely_to_be_promoted_and_dear_to_train_again_stays(make, job_dir):
    """Trial 3 has come further than trial 4, but three of four were ahead of it there; one of five was, of trial 4.
    Trial 1 is placed like trial 4, one of four ahead of it, and would cost twice as much to train again."""
    job = make(search={"keep": "0 MB"})
    paths, rows = create(job, job_dir / "runs"), []
    for number, (unit, accuracy) in enumerate([(4, 0.9), (2, 0.7), (2, 0.6), (2, 0.5), (1, 0.8)]):
        rows += [
            ShapeRow(trial=number, changes={}, units=UNITS, cost=1.0),
            DecidedRow(number=number, slot=0, trial=number, changes={}, start=0, end=unit, begins=0.0, ends=1.0),
            ToldRow(number=number, rows=[{"accuracy": accuracy}] * unit),
        ]
        file = paths.trial(number).checkpoints / "state"
        file.parent.mkdir(parents=True)
        file.write_bytes(bytes([number]) * 1000)
    forgotten = Keeper(job, paths).make_room(SearchTable.of(rows), busy=())
    assert [row.trial for row in forgotten] == [0, 3, 2, 4, 1]


LIMITED, SEVERAL = {"constraints": ["loss <= 1"]}, {"metric": ["loss", "accuracy"]}


@pytest.mark.parametrize(
    ("asked", "unit", "worse"),
    [
        (LIMITED, 1, {"accuracy": 0.95, "loss": 2.0}),
        (LIMITED, UNITS, {"accuracy": 0.95, "loss": 2.0}),
        (SEVERAL, 1, {"accuracy": 0.3, "loss": 0.5}),
    ],
)
def test_what_the_search_ranks_lower_is_forgotten_first(asked, unit, worse, make, job_dir):
    """By the first metric alone, trial 1 would be ahead of trial 0. Trial 2 beats it in both metrics."""
    job = make(search={"keep": "0 MB", **asked})
    paths, rows = create(job, job_dir / "runs"), []
    for number, row in enumerate([{"accuracy": 0.9, "loss": 0.51}, worse, {"accuracy": 0.4, "loss": 0.49}]):
        rows += [
            ShapeRow(trial=number, changes={}, units=UNITS, cost=1.0),
            DecidedRow(number=number, slot=0, trial=number, changes={}, start=0, end=unit, begins=0.0, ends=1.0),
            ToldRow(number=number, rows=[row] * unit),
        ]
        file = paths.trial(number).checkpoints / "state"
        file.parent.mkdir(parents=True)
        file.write_bytes(bytes([number]) * 1000)
    forgotten = [row.trial for row in Keeper(job, paths).make_room(SearchTable.of(rows), busy=())]
    assert forgotten.index(1) < forgotten.index(0)


def test_a_trial_that_is_forgotten_twice_counts_once(make, job_dir):
    job = make()
    ends = {"slot": 0, "trial": 0, "changes": {}, "begins": 0.0, "ends": 1.0}
    rows = [
        ShapeRow(trial=0, changes={}, units=UNITS, cost=1.0),
        DecidedRow(number=0, start=0, end=1, **ends),
        ToldRow(number=0, rows=[{"accuracy": 0.5}]),
        ForgottenRow(trial=0),
        DecidedRow(number=1, start=1, end=2, **ends),
        ToldRow(number=1, rows=[{"accuracy": 0.5}]),
        ForgottenRow(trial=0),
        EndedRow(best=0, why="it ends"),
    ]
    assert make_receipt(job, create(job, job_dir / "runs"), rows, workers=1, total_s=1.0).forgotten == 1
