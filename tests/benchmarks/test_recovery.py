"""What the rows say, on runs small enough to count by hand."""

import itertools
from dataclasses import replace

import pytest
from benchmarks.recovery import shoal_job
from benchmarks.recovery.killing import Tail
from benchmarks.recovery.measure import (
    Commit,
    Kill,
    Trace,
    lost_and_repeated,
    recovery_s,
    replay,
    step_s,
    summary,
)
from benchmarks.recovery.workload import CommitLog, Workload
from hypothesis import given
from hypothesis import strategies as st

from shoal.spec.load import load_job

WORKERS = 3


def steps(first, last, *, at=0.0, workers=range(WORKERS)):
    """Every worker commits steps first..last, one per second; worker w a little after the one before it."""
    return [
        Commit(at + number + worker / 100, worker, step, (step * WORKERS + worker,))
        for number, step in enumerate(range(first, last + 1))
        for worker in workers
    ]


def test_a_step_s_median_is_not_moved_by_a_recovery():
    assert step_s(steps(0, 9) + steps(10, 19, at=500)) == pytest.approx(1)


def test_a_survivor_goes_on_after_a_stop():
    commits = steps(0, 4) + steps(5, 9, at=12, workers=[0, 1])
    # step 5 might have been under way: step 6 was due at 6 and came at 13
    assert recovery_s(commits, Kill(4.5, 2), step_s=1) == pytest.approx(7)


def test_a_step_that_was_under_way_is_no_recovery():
    under_way = [Commit(4.6, 0, 5), Commit(4.6, 1, 5)]
    assert recovery_s(steps(0, 4) + under_way, Kill(4.5, 2), step_s=1) is None
    commits = steps(0, 4) + under_way + steps(6, 9, at=13, workers=[0, 1])
    assert recovery_s(commits, Kill(4.5, 2), step_s=1) == pytest.approx(7)


def test_a_world_that_starts_again_recovers_with_its_first_step():
    commits = steps(0, 7) + steps(5, 9, at=20)
    assert recovery_s(commits, Kill(7.5, 1), step_s=1) == pytest.approx(11.5)


def test_a_kill_that_nobody_noticed_cost_nothing():
    assert recovery_s(steps(0, 9), Kill(4.5, 1), step_s=1) == 0


def test_nobody_came_back():
    assert recovery_s(steps(0, 4), Kill(4.5, 1), step_s=1) is None


def test_steps_after_the_checkpoint_are_done_again_and_count_once():
    replayed = replay(steps(0, 7) + steps(5, 9, at=20) + steps(8, 11, at=40))
    assert replayed.steps_redone == 3 + 2
    assert sorted((one.step, one.worker) for one in replayed.kept) == [(s, w) for s in range(12) for w in range(3)]


def test_what_a_missing_worker_did_before_the_way_back_is_void():
    replayed = replay(steps(0, 7) + steps(5, 7, at=20, workers=[0]) + steps(8, 9, at=30))
    assert replayed.steps_redone == 3
    assert [one.worker for one in replayed.kept if one.step == 6] == [0]


def test_workers_that_follow_late_do_not_go_back_a_second_time():
    replayed = replay(steps(0, 7) + steps(5, 9, at=20, workers=[0]) + steps(6, 9, at=21.5, workers=[1, 2]))
    assert replayed.steps_redone == 3


def test_who_begins_the_new_attempt_before_others_have_gone_back_counts():
    """Worker 0 alone had committed step 5; the new processes of the others are faster now."""
    before = [replace(one, pid=one.worker + 1) for one in steps(0, 4) + steps(5, 5, at=5, workers=[0])]
    after = [replace(one, t=one.t - one.worker / 50, pid=one.worker + 11) for one in steps(5, 9, at=20)]
    replayed = replay(before + after)
    assert replayed.steps_redone == 1
    assert sorted((one.step, one.worker) for one in replayed.kept) == [(s, w) for s in range(10) for w in range(3)]
    assert all(one.pid > 10 for one in replayed.kept if one.step >= 5)


@given(st.integers(1, 30), st.lists(st.integers(1, 5), max_size=6))
def test_going_back_neither_loses_nor_repeats(length, returns):
    """An exact restart, however often it happens: every sample of every whole epoch is seen once."""
    commits, at, done, redone = steps(0, length - 1), 100.0, length, 0
    for back in returns:
        start = max(0, done - back)
        commits += steps(start, done, at=at)
        redone, done, at = redone + done - start, done + 1, at + 100
    replayed = replay(commits)
    assert replayed.steps_redone == redone
    whole = [Commit(c.t, c.worker, c.step, (c.step % 2 * WORKERS + c.worker,)) for c in replayed.kept]
    assert lost_and_repeated(whole, samples=2 * WORKERS, steps_per_epoch=2) == (0, 0)


def test_lost_and_repeated_samples():
    commits = [Commit(0, 0, 0, (0, 1)), Commit(0, 1, 0, (2, 3)), Commit(1, 0, 1, (4, 0))]
    assert lost_and_repeated(commits, samples=8, steps_per_epoch=2) == (3, 1)  # 5, 6 and 7; 0


def test_an_epoch_that_was_not_finished_does_not_count():
    assert lost_and_repeated([Commit(0, 0, 0, (0, 1))], samples=8, steps_per_epoch=2) == (0, 0)
    assert lost_and_repeated([], samples=8, steps_per_epoch=2) == (0, 0)


def test_workers_may_tell_the_samples_of_the_whole_step():
    commits = [Commit(0, worker, step, (2 * step, 2 * step + 1)) for step in (0, 1) for worker in range(3)]
    assert lost_and_repeated(commits, samples=4, steps_per_epoch=2) == (0, 0)


def test_a_summary_adds_up_runs_and_leaves_out_kills_without_a_recovery():
    came_back = Trace(steps(0, 7) + steps(5, 19, at=20), [Kill(7.5, 1)])
    gave_up = Trace(steps(0, 7), [Kill(7.5, 0)], failure="no step in 60 s")
    row = summary("it", [came_back, gave_up], samples=60, steps_per_epoch=20)
    assert row["all"] == [pytest.approx(11.5)]
    assert {name: row[name] for name in ("kills", "steps_redone", "samples_lost", "failed_to_come_back")} == {
        "kills": 2, "steps_redone": 3, "samples_lost": 0, "failed_to_come_back": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("proven", "told"), [([None], (0, "")), ([True, True], (0, "yes")), ([True, False], (None, "no"))]
)
def test_rows_that_tell_what_weights_should_hold_count_only_with_a_proof(proven, told):
    traces = [Trace(steps(0, 19), [Kill(7.5, 1)], proven=one) for one in proven]
    row = summary("it", traces, samples=60, steps_per_epoch=20)
    assert (row["samples_lost"], row["same_weights"]) == told
    assert row["samples_repeated"] == row["samples_lost"]


def test_shoal_tells_every_sample_of_a_step_once(tmp_path):
    workload = Workload(str(tmp_path), workers=3, batch_size=20, samples=240)
    sampler = shoal_job.make_job_sampler(load_job(shoal_job.write_job(workload)))
    epoch = [shoal_job.step_ids(sampler, step) for step in range(workload.steps_per_epoch)]
    assert {len(ids) for ids in epoch} == {60}
    assert sorted(itertools.chain(*epoch)) == list(range(240))


def test_a_summary_without_any_recovery():
    row = summary("it", [Trace(steps(0, 7), [Kill(7.5, 0)], failure="no")], samples=60, steps_per_epoch=20)
    assert (row["median_s"], row["worst_s"], row["all"]) == (None, None, [])


def test_rows_are_read_as_they_come_and_only_whole(tmp_path):
    workload = Workload(str(tmp_path), workers=2)
    tail, rows = Tail(workload), CommitLog(workload, 1)
    assert tail.new() == []
    rows.add(0, [3, 4])
    with (tmp_path / "rows-1.jsonl").open("ab") as file:
        file.write(b'{"t": 1, "wor')
    (one,) = tail.new()
    assert (one.worker, one.step, one.sample_ids) == (1, 0, [3, 4])
    with (tmp_path / "rows-1.jsonl").open("ab") as file:
        file.write(b'ker": 1, "step": 1}\n')
    assert [one.step for one in tail.new()] == [1]
    assert tail.new() == []
