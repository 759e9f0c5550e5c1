"""The membership policy under thousands of random schedules, and its decisions one by one."""

from contextlib import closing

import pytest

from shoal.plan.members import FIRST_PAUSE_S, EvictWorker, PublishView, StartWorkers
from shoal.plan.membership_policy import (
    MAX_FRUITLESS_VIEWS,
    SHORTEST_VIEW_S,
    TAKEOVER_S,
    MembershipPolicy,
)
from shoal.spec.view import Attachment
from tests.conftest import long_only
from tests.plan.membership_simulation import NO_ADDRESS, MembershipSimulation
from tests.plan.simulated_worker import require

BLOCK = 250


def attached(*, managed, can_save):
    return Attachment(managed=managed, can_save=can_save, needs_job=not can_save)


STARTED, JOINED = attached(managed=True, can_save=True), attached(managed=False, can_save=False)


@pytest.mark.parametrize("block", [*range(4), *long_only(*range(4, 8))])
def test_whatever_happens_the_rules_hold_and_when_nothing_more_happens_all_lanes_train(block):
    """What must always hold is checked in the world; here: it comes to rest, and stays there."""
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        try:
            with closing(MembershipSimulation(seed)) as world:
                run_with_faults(world)
        except Exception as failure:
            failure.add_note(f"seed {seed}")
            raise


def run_with_faults(world):
    faults = world.rng.choice((0.0, 0.03, 0.1, 0.2))
    for _ in range(world.rng.randint(50, 300)):
        world.step(faults)
    world.end_faults()
    before = world.views
    run_until_converged(world)
    require(world.views - before <= 40, f"{world.views - before} views until it rests")
    settled, commits = world.views, world.commits
    for _ in range(max(150, 40 * len(world.alive_workers()))):  # a commit takes some turns of every member
        world.step()
    for _ in range(1500):  # where many stand by, it may take a while until those who train have their turn
        if world.commits > commits:
            break
        world.step()
    require(world.views - settled <= 2, "views go on")  # lanes may once more move to who is faster
    require(world.commits > commits, "nobody trains")


def run_until_converged(world):
    for event in range(6000):
        world.step()
        if event % 10 == 0 and world.converged():
            return
    require(False, "it does not come to rest")


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_without_faults_two_views_are_enough(workers):
    """One that loads, one that trains; all begin together."""
    for seed in range(20):
        with closing(MembershipSimulation(seed, lanes=4, workers=workers)) as world:
            run_until_converged(world)
            assert world.views == 2
            assert len(world.driver.policy.view.carries) == workers


# ---- one by one ----


class PolicyHarness:
    """A membership policy whose members stand where they are told to. `orders` are those so far, without starts."""

    def __init__(self, *, lanes=4, wanted=2):
        self.policy = MembershipPolicy(lanes=lanes, wanted_workers=wanted)
        self.now_s = 0.0
        self.orders = []
        self.timed = {}
        self.started = 0
        self.decide()

    def decide(self, passed_s=0.0):
        self.now_s += passed_s
        for order in self.policy.decide(self.now_s):
            if isinstance(order, StartWorkers):
                for _ in range(order.count):
                    self.policy.expect(self.started)
                    self.started += 1
            else:
                self.orders.append(order)
        return self.orders

    @property
    def last(self):
        return self.orders[-1].view

    def arrive(self, *seats, attachment=STARTED, view=0, training=False):
        for seat in seats:
            self.policy.arrived(seat, attachment, address=NO_ADDRESS, view=view, training=training)

    def stop_at(self, positions):
        """After it saw the last view that it was told of."""
        for seat, position in positions.items():
            self.policy.stopped_at(seat, self.now_s, view=self.policy.members[seat].last_view_sent, position=position)
        self.decide()

    def measure(self, lane_s):
        """Twelve seconds in which every lane takes as long as is said here."""
        for _ in range(12):
            for seat, seconds in lane_s.items():
                count, total_s = self.timed.get(seat, (0, 0.0))
                self.timed[seat] = (count + 10, total_s + 10 * seconds)
                self.policy.observe_lanes(seat, self.now_s, count=count + 10, total_s=total_s + 10 * seconds)
            self.decide(1.0)

    def train(self, positions):
        """All of them in a view at a position, the first as the one that loads."""
        self.arrive(*positions)
        self.stop_at(dict.fromkeys(positions, 0))
        self.stop_at({self.last.loads: max(positions.values())})
        assert set(self.last.carries) == set(positions)
        self.decide(2 * SHORTEST_VIEW_S)
        return self


def test_nobody_begins_while_the_checkpoint_is_being_loaded():
    harness = PolicyHarness()
    harness.arrive(0, 1)
    harness.stop_at({0: 0, 1: 0})
    assert [order.view.loads for order in harness.orders] == [0]
    harness.decide(60.0)
    assert len(harness.orders) == 1
    harness.stop_at({0: 100})
    assert (harness.last.position, harness.last.source, harness.last.carries) == (100, 0, {0: [0, 1], 1: [2, 3]})


def test_if_the_loader_dies_another_loads():
    harness = PolicyHarness()
    harness.arrive(0, 1)
    harness.stop_at({0: 0, 1: 0})
    harness.policy.gone(0)
    harness.arrive(2)
    harness.stop_at({2: 0})
    assert harness.last.loads == 1


@pytest.mark.parametrize(("loaded", "goes_on_from"), [(14, 14), (10, 12)])
def test_a_state_that_is_older_than_the_newest_checkpoint_does_not_hide_it(loaded, goes_on_from):
    """A worker that was cut off before the run was stopped finds the next driver. The newest checkpoint may turn out
    to be damaged: an older one is loaded then."""
    harness = PolicyHarness()
    harness.policy.saved_step = 7
    harness.arrive(5, attachment=attached(managed=False, can_save=True), view=9)
    harness.arrive(0, 1)
    harness.stop_at({5: 12, 0: 0, 1: 0})
    assert harness.last.loads == 0
    harness.stop_at({0: loaded})
    assert (harness.last.position, harness.last.loads) == (goes_on_from, None)
    harness.policy.gone(0)
    harness.decide()
    harness.stop_at({5: goes_on_from, 1: goes_on_from})
    assert (harness.last.position, harness.last.loads) == (goes_on_from, None)


def test_who_calls_again_is_not_expected_again():
    harness = PolicyHarness().train({0: 4, 1: 4})
    harness.arrive(1)
    assert harness.policy.members[1].training
    assert not harness.policy._expected


def test_what_was_said_before_the_last_view_was_seen_does_not_count():
    harness = PolicyHarness().train({0: 4, 1: 4})
    harness.policy.stopped_at(0, harness.now_s, view=harness.last.number - 1, position=0)
    assert harness.policy.members[0].training


def test_one_that_stops_stops_all_and_the_highest_position_counts():
    harness = PolicyHarness().train({0: 4, 1: 4})
    harness.stop_at({1: 6})
    assert (harness.last.halt, harness.orders[-1].seats) == ("now", [0])
    harness.stop_at({0: 8})
    assert (harness.last.position, harness.last.source) == (8, 0)


def test_a_death_stops_all_at_once_and_the_place_is_filled():
    harness = PolicyHarness().train({0: 4, 1: 4})
    harness.policy.gone(0)
    harness.decide()
    assert (harness.last.halt, harness.orders[-1].seats, harness.orders[-1].why) == ("now", [1], "worker-0 is gone")
    assert harness.started == 3
    harness.stop_at({1: 6})
    assert harness.last.carries == {1: [0, 1, 2, 3]}
    assert harness.last.saver == 1


def test_a_stop_waits_for_workers_that_outlived_an_earlier_driver():
    """One of them may hold the newest state: it saves before all leave."""
    policy = MembershipPolicy(lanes=4, wanted_workers=2)
    for seat in (3, 4):
        policy.expect(seat, returns=True)
    policy.stop("stopped")
    assert policy.decide(1.0) == []
    policy.gone(4)
    attachment = Attachment(managed=True, can_save=True, needs_job=False)
    policy.arrived(3, attachment, address=NO_ADDRESS, view=5, training=True)
    policy.stopped_at(3, 2.0, view=5, position=8)
    (order,) = [one for one in policy.decide(3.0) if isinstance(one, PublishView)]
    assert (order.view.stop, order.view.saver) == ("stopped", 3)


def test_a_newcomer_follows_then_enters_at_a_boundary():
    harness = PolicyHarness(wanted=1).train({0: 4})
    harness.policy.scale(2)
    harness.decide()
    harness.arrive(1)
    harness.stop_at({1: 0})
    assert (harness.last.followers, harness.last.source) == ([1], 0)
    harness.stop_at({1: 10})
    assert (harness.last.halt, harness.orders[-1].seats) == ("boundary", [0])
    harness.stop_at({0: 12})
    assert (harness.last.carries, harness.last.position, harness.last.source) == ({0: [0, 1], 1: [2, 3]}, 12, 0)


def test_a_newcomer_that_is_much_too_slow_is_left_in_peace():
    """Else it would be let in, left out and let in again, for ever."""
    harness = PolicyHarness(wanted=2).train({0: 4, 1: 4})
    harness.measure({0: 0.01, 1: 1.0})
    assert harness.orders[-1].why == "lanes move to faster workers"
    harness.stop_at({0: 6, 1: 6})
    assert harness.last.carries == {0: [0, 1, 2, 3]}
    views = len(harness.orders)
    harness.stop_at({1: 6})
    for _ in range(20):
        harness.decide(1.0)
        harness.stop_at({1: 6})
    assert len(harness.orders) <= views + 1


def test_one_that_missed_a_view_does_not_leave_the_others_waiting_for_it():
    """It saw that it should halt before it took up the view in which the others wait."""
    harness = PolicyHarness(wanted=2).train({0: 4, 1: 4})
    harness.policy.drain(0, "drained", replace=False)
    harness.decide()
    assert harness.last.halt == "boundary"
    harness.stop_at({1: 4})
    assert (harness.last.halt, harness.orders[-1].seats) == ("now", [0])


def test_who_stops_at_the_boundary_alarms_nobody():
    harness = PolicyHarness(wanted=2).train({0: 4, 1: 4})
    harness.policy.drain(1, "drained", replace=False)
    harness.decide()
    harness.stop_at({1: 6})
    assert harness.last.halt == "boundary"
    harness.stop_at({0: 6})
    assert [order.view.carries or order.view.leave for order in harness.orders[-2:]] == [{0: [0, 1, 2, 3]}, [1]]
    assert set(harness.orders[-2].view.addresses) == {0, 1}, "who stays may want what the other remembers"


def test_the_only_holder_stays_until_another_holds_the_same():
    harness = PolicyHarness(wanted=1).train({0: 4})
    harness.policy.drain(0, "terminated", replace=True)
    harness.decide()
    assert harness.started == 2
    harness.arrive(1)
    harness.stop_at({1: 0})
    harness.decide(2 * SHORTEST_VIEW_S)
    assert harness.last.halt == "boundary"
    harness.stop_at({0: 6})
    assert (set(harness.last.carries), harness.last.source, harness.last.saver) == ({0, 1}, 0, 1)
    harness.decide(2 * SHORTEST_VIEW_S)
    harness.stop_at({0: 8})
    assert not harness.last.leave
    harness.stop_at({1: 8})
    assert [order.view.carries or order.view.leave for order in harness.orders[-2:]] == [{1: [0, 1, 2, 3]}, [0]]


def test_a_single_lane_is_handed_over_by_checkpoint():
    harness = PolicyHarness(lanes=1, wanted=1).train({0: 4})
    harness.policy.drain(0, "terminated", replace=True)
    harness.arrive(1)
    harness.stop_at({1: 0})
    harness.decide(2 * SHORTEST_VIEW_S)
    harness.stop_at({0: 6})
    assert (harness.last.leave, harness.last.saver) == ([0], 0)
    harness.decide(60.0)
    assert harness.last.leave == [0]
    harness.policy.gone(0)
    harness.decide()
    assert harness.last.loads == 1


def test_another_driver_stops_those_who_train_and_goes_on_where_they_are():
    harness = PolicyHarness(wanted=2)
    harness.arrive(0, 1, view=7, training=True)
    harness.decide()
    assert (harness.last.number, harness.last.halt, harness.orders[-1].seats) == (8, "boundary", [0, 1])
    harness.stop_at({0: 20, 1: 20})
    assert (harness.last.position, harness.last.source, set(harness.last.carries)) == (20, None, {0, 1})


def test_a_survivor_may_have_begun_to_train_whatever_it_says():
    """It saw a view of the driver that died, and had not taken it up when it called."""
    harness = PolicyHarness(wanted=1)
    harness.arrive(0, view=7, training=False)
    harness.policy.stopped_at(0, harness.now_s, view=6, position=10)
    harness.decide()
    assert (harness.last.halt, harness.orders[-1].seats) == ("boundary", [0])


def test_a_survivor_that_calls_late_is_stopped_alone():
    harness = PolicyHarness(wanted=2)
    harness.arrive(0, view=7, training=True)
    harness.decide()
    harness.stop_at({0: 20})
    assert set(harness.last.carries) == {0}
    harness.arrive(1, view=12, training=True)
    harness.decide()
    assert (harness.last.number, harness.last.halt, harness.orders[-1].seats) == (13, "now", [1])


def test_lanes_that_are_full_leave_newcomers_standing():
    harness = PolicyHarness(lanes=2, wanted=2).train({0: 4, 1: 4})
    views = len(harness.orders)
    harness.arrive(2, attachment=JOINED)
    harness.stop_at({2: None})
    harness.decide(60.0)
    assert len(harness.orders) == views


def test_at_a_stop_all_stand_then_one_saves_and_then_all_leave():
    harness = PolicyHarness(wanted=3).train({0: 4, 1: 4, 2: 4})
    harness.policy.stop("interrupted")
    harness.decide()
    assert (harness.last.halt, harness.orders[-1].seats) == ("boundary", [0, 1, 2])
    harness.stop_at({0: 6, 1: 6, 2: 6})
    assert (harness.last.stop, harness.last.saver, harness.orders[-1].seats) == ("interrupted", 0, [0])
    harness.decide(60.0)
    harness.policy.gone(0, left_cleanly=True)
    harness.decide()
    assert (harness.last.stop, harness.last.saver, harness.orders[-1].seats) == ("interrupted", None, [1, 2])


def test_if_the_saver_dies_at_a_stop_another_saves():
    harness = PolicyHarness(wanted=3).train({0: 4, 1: 4, 2: 4})
    harness.policy.stop("interrupted")
    harness.decide()
    harness.policy.gone(0)
    harness.decide()
    assert (harness.last.halt, harness.orders[-1].seats) == ("now", [1, 2])
    harness.stop_at({1: 4, 2: 6})
    assert (harness.last.saver, harness.orders[-1].seats) == (2, [2])
    harness.policy.gone(2)
    harness.decide()
    assert (harness.last.saver, harness.orders[-1].seats) == (1, [1])


def test_who_is_being_started_when_fewer_are_wanted_goes_again():
    harness = PolicyHarness(wanted=2).train({0: 4, 1: 4})
    harness.policy.scale(3)
    harness.decide()
    assert harness.started == 3
    harness.policy.scale(2)
    harness.arrive(2)
    harness.stop_at({2: 0})
    assert harness.last.leave == [2]


def test_stop_lets_one_save_when_all_stand_and_then_all_go():
    harness = PolicyHarness().train({0: 4, 1: 4})
    harness.policy.stop("interrupted")
    harness.decide()
    assert (harness.last.halt, harness.orders[-1].seats) == ("boundary", [0, 1])
    harness.stop_at({0: 6, 1: 6})
    assert (harness.last.stop, harness.last.saver, harness.orders[-1].seats) == ("interrupted", 0, [0])
    harness.decide(60.0)
    assert harness.orders[-1].seats == [0]
    harness.policy.gone(0, left_cleanly=True)
    harness.decide()
    assert (harness.last.stop, harness.last.saver, harness.orders[-1].seats) == ("interrupted", None, [1])


def test_after_everybody_was_dismissed_nothing_is_ordered():
    harness = PolicyHarness().train({0: 4, 1: 4})
    order = harness.policy.dismiss("finished")
    assert (order.view.stop, order.seats) == ("finished", [0, 1])
    harness.policy.gone(1)
    assert harness.policy.decide(harness.now_s + 60.0) == []


def test_lanes_do_not_move_to_and_fro_because_the_one_that_saves_is_slow():
    """It cannot be left out: what there is to gain is counted with it."""
    harness = PolicyHarness().train({0: 4, 1: 4})
    harness.measure({0: 1.0, 1: 0.01})
    harness.stop_at({0: 6, 1: 6})
    assert harness.last.carries == {0: [0], 1: [1, 2, 3]}
    views = len(harness.orders)
    for _ in range(20):
        harness.measure({0: 1.0, 1: 0.01})
    assert len(harness.orders) == views


def test_another_driver_does_not_wait_for_ever_for_a_boundary():
    """They may wait for one that died, or never saw the view."""
    harness = PolicyHarness(wanted=2)
    harness.arrive(0, view=7, training=True)
    harness.decide()
    harness.decide(2 * TAKEOVER_S)
    assert [order.view.halt for order in harness.orders] == ["boundary", "now"]


@pytest.mark.parametrize(
    ("wanted", "going"),
    [(4, []), (3, []), (2, [2]), (1, [2, 1])],
)
def test_scale_sends_the_newest_away_and_never_the_one_that_saves(wanted, going):
    harness = PolicyHarness(lanes=8, wanted=3).train({0: 4, 1: 4, 2: 4})
    assert harness.last.saver == 0
    assert harness.policy.scale(wanted) == going
    assert harness.policy.wanted_workers == wanted
    assert [seat for seat, m in harness.policy.members.items() if m.leaving] == sorted(going)
    assert harness.policy.scale(wanted) == []  # once is enough
    harness.decide()
    assert harness.started == 3 + max(wanted - 3, 0)


@pytest.mark.parametrize(
    ("managed", "replace", "wanted"),
    [(True, True, 3), (True, False, 2), (False, True, 2), (False, False, 2)],
    ids=["terminated here", "drained here", "terminated elsewhere", "drained elsewhere"],
)
@pytest.mark.parametrize("can_save", [True, False])
def test_who_leaves_is_replaced_if_the_engine_started_it(managed, replace, wanted, can_save):
    harness = MembershipPolicy(lanes=8, wanted_workers=3 if managed else 2)
    for seat in (0, 1):
        harness.arrived(seat, STARTED, address=NO_ADDRESS)
    harness.arrived(2, attached(managed=managed, can_save=can_save), address=NO_ADDRESS)
    assert harness.wanted_workers == 3
    harness.drain(2, "why", replace=replace)
    assert harness.wanted_workers == wanted
    harness.drain(2, "again", replace=replace)
    harness.gone(2)
    assert harness.wanted_workers == wanted  # counted once


def test_who_comes_by_itself_is_counted_while_it_is_there():
    harness = MembershipPolicy(lanes=8, wanted_workers=2)
    harness.arrived(5, JOINED, address=NO_ADDRESS)
    harness.arrived(5, JOINED, address=NO_ADDRESS)
    assert harness.wanted_workers == 3
    harness.gone(5)
    harness.gone(5)
    assert harness.wanted_workers == 2
    harness.arrived(6, STARTED, address=NO_ADDRESS)
    harness.gone(6)
    assert harness.wanted_workers == 2  # it is started again


def test_somebody_who_can_save_is_always_wanted():
    harness = MembershipPolicy(lanes=8, wanted_workers=1)
    harness.arrived(0, JOINED, address=NO_ADDRESS)
    harness.scale(1)
    assert harness.decide(0.0) == [StartWorkers(1)]


@pytest.mark.parametrize("managed", [True, False])
def test_a_member_that_cannot_save_is_not_enough_and_one_that_can_is(managed):
    policy = MembershipPolicy(lanes=8, wanted_workers=1 if managed else 0)
    policy.arrived(0, attached(managed=managed, can_save=False), address=NO_ADDRESS)
    policy.stopped_at(0, 0.0, view=0, position=None)
    assert policy.decide(0.0) == [StartWorkers(1)]
    policy.arrived(1, attached(managed=False, can_save=True), address=NO_ADDRESS)
    policy.stopped_at(1, 0.0, view=0, position=0)
    (loads,) = policy.decide(0.0)
    assert loads.view.loads == 1, "whoever started it, it can save"


def test_who_was_being_started_when_fewer_were_wanted_goes_again():
    harness = PolicyHarness(wanted=2)
    harness.arrive(0)
    harness.policy.scale(1)
    harness.arrive(1)
    assert [seat for seat, m in harness.policy.members.items() if m.leaving] == [1]


def test_who_was_started_because_nobody_else_can_save_stays():
    """Else it would be sent away and another one started, for ever."""
    harness = PolicyHarness(wanted=1)
    harness.arrive(7, attachment=JOINED)
    harness.policy.scale(1)
    harness.arrive(0)
    assert not harness.policy.members[0].leaving


def test_a_follower_that_is_not_wanted_any_more_goes_at_once():
    harness = PolicyHarness(wanted=1).train({0: 4})
    harness.arrive(7, attachment=JOINED)
    harness.stop_at({7: None})
    assert harness.last.followers == [7]
    harness.policy.drain(7, "drained", replace=False)
    harness.stop_at({7: 10})
    assert harness.last.leave == [7]


# ---- workers that joined, and lie ----


def joined_liar(position=500):
    """Two workers that train from position 100, and one that joined, followed, and claims another position."""
    harness = PolicyHarness(lanes=3).train({0: 100, 1: 100})
    harness.arrive(7, attachment=JOINED)
    harness.stop_at({7: None})
    assert harness.last.followers == [7]
    harness.stop_at({7: position})
    harness.decide(2 * SHORTEST_VIEW_S)
    assert harness.last.halt == "boundary"
    harness.stop_at({0: 110, 1: 110})
    return harness


def fail_view(harness, stays_at):
    """The members stop by themselves, without a step: nobody gets the state of the source."""
    first, *others = sorted(harness.last.carries)
    harness.stop_at({first: stays_at[first]})
    assert harness.last.halt == "now"
    harness.stop_at({seat: stays_at[seat] for seat in others})


def test_a_source_that_gives_nothing_is_evicted_after_the_second_view():
    harness = joined_liar()
    stays_at = {0: 110, 1: 110, 7: 500}
    assert (harness.last.source, harness.last.position) == (7, 500)
    fail_view(harness, stays_at)
    assert (harness.last.source, harness.last.position) == (7, 500), "once may be an accident"
    fail_view(harness, stays_at)
    (evicted,) = [order for order in harness.orders if isinstance(order, EvictWorker)]
    assert (evicted.seat, "from its state" in evicted.why) == (7, True)
    harness.policy.gone(7)
    harness.decide()
    assert (harness.last.carries.keys(), harness.last.position) == ({0, 1}, 110)


def test_a_step_in_between_is_forgiven():
    harness = joined_liar()
    fail_view(harness, {0: 110, 1: 110, 7: 500})
    assert harness.policy.members[7].fruitless_views == 1
    fail_view(harness, {0: 502, 1: 502, 7: 502})
    assert harness.policy.members[7].fruitless_views == 0
    assert not [order for order in harness.orders if isinstance(order, EvictWorker)]


def test_a_joined_worker_that_stops_every_view_is_evicted():
    """It is not the source, and it lets nobody make a step."""
    harness = joined_liar(position=100)
    stays_at = {0: 110, 1: 110, 7: 110}
    assert harness.last.source == 0
    fail_view(harness, stays_at)
    fail_view(harness, stays_at)
    (evicted,) = [order for order in harness.orders if isinstance(order, EvictWorker)]
    assert (evicted.seat, "with it" in evicted.why) == (7, True)


def test_a_view_that_ends_because_a_member_is_gone_is_nobodys_fault():
    harness = joined_liar(position=100)
    harness.stop_at({7: 110})
    harness.policy.gone(1)
    harness.decide()
    harness.stop_at({0: 110})
    assert harness.last.carries, "the others go on"
    assert harness.policy.members[7].fruitless_views == 0


# ---- machines that reach the driver and not each other ----


@pytest.fixture
def alone():
    """0 and 1 do not reach each other: 0 trains alone."""
    harness = PolicyHarness(lanes=3).train({0: 100, 1: 100})
    for _ in range(MAX_FRUITLESS_VIEWS):
        fail_view(harness, {0: 100, 1: 100})
    return harness


def is_followed(harness):
    return [order.view.followers for order in harness.orders if isinstance(order, PublishView) and order.view.followers]


def test_of_the_engines_workers_one_is_left_out_and_nobody_is_evicted_or_replaced(alone):
    assert (alone.last.carries.keys(), alone.last.position) == ({0}, 100)
    assert sorted(lane for lanes in alone.last.carries.values() for lane in lanes) == [0, 1, 2]
    alone.decide(FIRST_PAUSE_S / 2)
    assert alone.last.carries.keys() == {0}, "nobody disturbs it"
    assert not [order for order in alone.orders if isinstance(order, EvictWorker | StartWorkers)]


def test_one_that_was_left_out_returns_if_it_can_catch_up(alone):
    alone.decide(FIRST_PAUSE_S)
    assert alone.last.followers == [1]
    alone.stop_at({1: 130})
    alone.decide(2 * SHORTEST_VIEW_S)
    assert alone.last.halt == "boundary"
    alone.stop_at({0: 140})
    assert alone.last.carries.keys() == {0, 1}


def test_one_that_cannot_catch_up_waits_for_twice_as_long_and_disturbs_nobody(alone):
    alone.decide(FIRST_PAUSE_S)
    alone.stop_at({1: 100})
    assert not alone.last.halt
    alone.decide(1.5 * FIRST_PAUSE_S)
    assert (len(is_followed(alone)), alone.last.halt) == (1, "")
    alone.decide(0.5 * FIRST_PAUSE_S)
    assert (len(is_followed(alone)), alone.last.followers) == (2, [1])


def test_one_that_was_left_out_goes_on_if_the_others_die(alone):
    alone.policy.gone(0)
    alone.decide()
    assert (alone.last.carries.keys(), alone.last.position) == ({1}, 100)


def test_of_three_the_one_that_stopped_first_is_left_out():
    harness = PolicyHarness(lanes=3, wanted=3).train({0: 100, 1: 100, 2: 100})
    for _ in range(MAX_FRUITLESS_VIEWS):
        harness.stop_at({1: 100})
        harness.stop_at({0: 100, 2: 100})
    assert harness.last.carries.keys() == {0, 2}


def test_a_single_view_without_a_step_after_a_good_one_leaves_nobody_out(alone):
    alone.decide(FIRST_PAUSE_S)
    alone.stop_at({1: 130})
    alone.decide(2 * SHORTEST_VIEW_S)
    alone.stop_at({0: 140})
    fail_view(alone, {0: 140, 1: 140})
    assert alone.last.carries.keys() == {0, 1}
