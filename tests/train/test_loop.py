"""When the loop steps, evaluates, saves and stops. The strategy is a fake, everything else is real."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.collectives.outcome import Committed, Discarded
from shoal.errors import ShoalError
from shoal.strategies.local_sgd.schedule import SyncSchedule
from shoal.train.loop import LoopResult, TrainSchedule
from tests.train.fake_strategy import Bench

ALONE = {0: [0, 1, 2, 3]}


def trained(bench, seat=0, **view):
    made = bench.view(**view)
    assert bench.strategy.enter(made, seat) is None
    bench.strategy.calls.clear()
    return bench.loop.train(made, seat)


def test_a_whole_run_in_the_order_in_which_it_happens():
    bench = Bench(splits=("validation", "test"))
    assert trained(bench) == LoopResult(6, finished=True)
    assert bench.strategy.calls == [
        *("step", "save", "step", "save", "step"),  # where an evaluation is due, the save comes after it
        *("evaluate validation", "adopt 1.0", "save, forced"),
        *("step", "save", "step", "save", "step"),
        *("evaluate validation", "adopt 1.0", "save"),  # no better than before
        *("evaluate test", "finish"),
    ]
    assert [model.weights_sha256 for model in bench.concluded] == ["weights 6"]
    assert bench.stream.kinds() == ["joined", "evaluated", "best", "evaluated", "evaluated"]


@pytest.mark.parametrize(("saver", "told"), [(0, [1, 2, 3]), (1, [])])
def test_the_leader_tells_of_each_evaluation_when_its_event_can_be_read(saver, told):
    bench, found = Bench(splits=("validation", "test")), []
    bench.loop.evaluated = lambda: found.append(len(bench.stream.of("evaluated")))
    trained(bench, saver=saver)
    assert found == told


def test_without_held_out_parts_there_is_nothing_to_evaluate():
    bench = Bench(splits=())
    assert trained(bench) == LoopResult(6, finished=True)
    assert bench.strategy.calls == ["step", "save"] * 6 + ["finish"]


def test_the_end_is_evaluated_wherever_it_is():
    bench = Bench(steps=4, evaluate_every=100)
    trained(bench)
    assert bench.strategy.calls[-4:] == ["evaluate validation", "adopt 1.0", "save, forced", "finish"]


def test_a_step_is_evaluated_once():
    """A schedule may learn from it: twice would be another result."""
    bench = Bench()
    bench.progress.evaluated_at = 3
    trained(bench, position=7)
    assert bench.strategy.calls[0] == "step"


def test_an_evaluation_that_is_not_known_yet_comes_before_the_next_step():
    bench = Bench()
    trained(bench, position=6)
    assert bench.strategy.calls[:2] == ["evaluate validation", "adopt 1.0"]


def test_only_better_results_are_forced_into_a_checkpoint():
    bench, values = Bench(steps=9), iter([0.5, 0.7, 0.2])
    bench.strategy.evaluate = lambda split: {"loss": next(values)}
    trained(bench)
    saves = [call for call in bench.strategy.calls if call.startswith("save")]
    assert saves == ["save", "save", "save, forced", "save", "save", "save", "save", "save", "save, forced"]
    assert (bench.best.value, bench.best.step) == (0.2, 9)


def test_where_best_checkpoints_are_not_kept_none_is_forced():
    bench = Bench(keep_best=False)
    trained(bench)
    assert "save, forced" not in bench.strategy.calls


@pytest.mark.parametrize("verb", ["step", "evaluate validation", "evaluate test", "finish"])
def test_what_is_discarded_comes_back_as_it_is(verb):
    bench = Bench(splits=("validation", "test"))
    bench.strategy.lost[verb] = "worker-1 is gone"
    assert trained(bench) == Discarded("worker-1 is gone")
    assert bench.strategy.calls[-1] == verb
    assert bench.concluded == []


def test_a_discarded_step_is_not_counted_and_may_be_made_in_another_view():
    bench = Bench(splits=())
    bench.strategy.lost["step"] = "worker-1 is gone"
    trained(bench)
    assert (bench.progress.step, bench.strategy.weight) == (0, 0)
    assert trained(bench, number=2) == LoopResult(6, finished=True)


def test_a_finished_run_may_be_finished_again():
    """The leader died before it was done: all come back with the last step, and one concludes."""
    bench = Bench(splits=())
    bench.strategy.lost["finish"] = "worker-0 is gone"
    assert isinstance(trained(bench), Discarded)
    assert trained(bench, number=2, position=12) == LoopResult(6, finished=True)
    assert bench.strategy.calls == ["finish"]


# ---- halts ----


def test_a_newer_view_lets_all_members_stop_at_the_same_boundary():
    bench = Bench()
    bench.publish(number=2)
    assert trained(bench) is None
    assert bench.strategy.calls == ["step", "save", "leave_view"]


def test_leaving_a_view_may_fail_too():
    bench = Bench()
    bench.publish(number=2)
    bench.strategy.lost["leave_view"] = "worker-1 is gone"
    assert trained(bench) == Discarded("worker-1 is gone")


@pytest.mark.parametrize("case", [{"carries": ALONE}, {"lockstep": False}], ids=["alone", "not in lockstep"])
def test_a_worker_that_need_not_wait_for_others_stops_before_the_step(case):
    bench = Bench(lockstep=case.get("lockstep", True))
    bench.publish(number=2)
    assert trained(bench, carries=case.get("carries")) is None
    assert bench.strategy.calls == []


def test_a_reason_to_leave_is_a_reason_to_halt():
    bench = Bench()
    bench.leave_reason = "terminated"
    assert trained(bench) is None
    assert bench.strategy.calls == ["step", "save", "leave_view"]


def test_an_evaluation_that_is_due_comes_after_the_halt():
    """The members of the next view do it: the position says that it is still to be done."""
    bench = Bench()
    made = bench.view(position=4)
    bench.strategy.enter(made, 0)
    bench.publish(number=2)
    assert bench.loop.train(made, 0) is None
    assert bench.strategy.calls == ["enter", "step", "leave_view"]
    assert bench.progress.position == 6


# ---- who reports ----


def test_the_leader_reports_and_the_others_know():
    leader, other = Bench(), Bench()
    trained(leader, seat=0)
    trained(other, seat=1)
    assert leader.stream.kinds() == ["joined", "evaluated", "best", "evaluated"]
    assert other.stream.kinds() == ["joined"]
    assert other.best.state() == leader.best.state()
    assert other.progress.state() == leader.progress.state()


def test_the_next_leader_reports_again_what_the_last_may_have_kept_to_itself():
    bench = Bench(steps=4)
    trained(bench, seat=1)
    bench.stream.events.clear()
    trained(bench, seat=1, number=2, position=9, saver=1)
    again = [(event.kind, event.step) for event in bench.stream.events if event.fields.get("again")]
    assert again == [("evaluated", 4)]  # the best was an earlier one
    assert bench.stream.kinds()[0] == "joined"


def test_the_next_leader_saves_the_best_if_that_is_where_it_stands():
    bench = Bench(steps=9)
    bench.strategy.lost["adopt 1.0"] = lambda: bench.strategy.lost.update(step="worker-0 is gone")
    assert isinstance(trained(bench, seat=1), Discarded)
    bench.strategy.lost["step"] = "stop here"
    trained(bench, seat=1, number=2, position=7, saver=1)
    assert bench.strategy.calls == ["save_alone", "step"]
    assert bench.store.saved == 3


def test_a_worker_that_led_before_does_not_report_again():
    bench = Bench(steps=3)
    trained(bench)
    bench.stream.events.clear()
    trained(bench, number=2, position=7)
    assert bench.stream.kinds() == ["joined"]


# ---- watchers ----


class StopsAt:
    def __init__(self, step):
        self.step, self.seen = step, []

    def watch(self, event):
        if event.kind == "step":
            self.seen.append((event.step, event["samples"]))
        return "enough" if event.kind == "step" and event.step >= self.step else None


def test_a_watcher_may_end_the_run():
    watcher = StopsAt(2)
    bench = Bench(watchers=[watcher])
    assert trained(bench) == LoopResult(2, finished=True, why="enough")
    assert bench.strategy.calls[-4:] == ["evaluate validation", "adopt 1.0", "save, forced", "finish"]
    assert watcher.seen == [(1, 10), (2, 10)]


def test_a_watcher_that_fails_ends_the_worker():
    class Fails:
        def watch(self, event):
            raise RuntimeError("no disk")

    with pytest.raises(ShoalError, match="no disk") as caught:
        trained(Bench(watchers=[Fails()]))
    assert caught.value.code == "SH410"


def test_a_loss_that_is_no_number_ends_the_worker():
    bench = Bench()
    bench.strategy.run_step = lambda must_halt: bench.progress.record_commit(
        Committed(torch.tensor(math.nan)), step=1, lr=0.1
    )
    with pytest.raises(ShoalError, match="nan at step 1") as caught:
        trained(bench)
    assert caught.value.code == "SH403"


# ---- leaving ----


@pytest.mark.parametrize("leads", [True, False])
def test_who_leads_saves_before_it_leaves(leads):
    bench = Bench()
    bench.reporter.is_leader = leads
    assert bench.loop.leave("asked to leave") == LoopResult(0, finished=False, why="asked to leave")
    assert bench.strategy.calls == (["save_alone"] if leads else [])
    assert bench.store.waited == 1
    assert bench.stream.kinds() == ["left"]


def test_a_worker_without_a_state_has_nothing_to_save():
    bench = Bench()
    bench.progress.has_state = False
    bench.reporter.is_leader = True
    bench.loop.leave("asked to leave")
    assert bench.strategy.calls == []
    assert bench.store.waited == 0


def test_nobody_leads_before_there_is_a_view():
    assert not Bench().reporter.is_leader


# ---- schedules ----


@pytest.mark.parametrize(
    ("schedule", "due"),
    [
        (TrainSchedule(12, 3), [3, 6, 9, 12]),
        (TrainSchedule(12, 5), [5, 10]),
        (TrainSchedule(12, 3, sync_schedule=SyncSchedule(4)), [4, 8, 12]),
        (TrainSchedule(12, 8, sync_schedule=SyncSchedule(2, 2)), [8]),
    ],
)
def test_evaluations_are_due_at_the_first_commit_that_has_reached_a_multiple(schedule, due):
    every = schedule.sync_schedule.steps_per_sync
    assert [step for step in range(0, 13, every) if schedule.evaluation_due(step)] == due


# ---- whatever happens ----

LOST = st.sampled_from(["step", "evaluate validation", "evaluate test", "leave_view", "finish"])


@given(lost=st.lists(LOST, max_size=6), halts=st.sets(st.integers(1, 8)))
def test_losses_and_halts_change_nothing_in_the_result(lost, halts):
    """Each view loses a member at one verb, and halts after some of its steps."""
    once, bench = (Bench(steps=8, splits=("validation", "test")) for _ in range(2))
    trained(once)
    bench.loop.membership = Halting(bench.progress, halts)
    outcome, number = None, 0
    while not isinstance(outcome, LoopResult):
        number += 1
        bench.strategy.lost = {lost.pop(): "worker-1 is gone"} if lost else {}
        outcome = trained(bench, number=number, position=bench.progress.position)
    assert outcome == LoopResult(8, finished=True)
    assert bench.progress.state() == once.progress.state()
    assert [model.weights_sha256 for model in bench.concluded] == ["weights 8"]
    evaluated = [event.step for event in bench.stream.of("evaluated") if event["split"] == "validation"]
    assert evaluated == [3, 6, 8]


class Halting:
    """A membership with a newer view whenever one of these steps is the next; each halts once."""

    def __init__(self, progress, steps):
        self.progress, self.steps = progress, set(steps)

    def newer(self, number):
        halts = self.progress.step + 1 in self.steps
        self.steps.discard(self.progress.step + 1)
        return halts
