"""The membership policy of sharded runs: whole replicas, and parts that stay where they are."""

import pytest

from shoal.plan.members import PublishView, StartWorkers
from shoal.plan.membership_policy import SHORTEST_VIEW_S
from shoal.plan.sharded_membership import SAVE_RETRY_S, ShardedMembershipPolicy
from shoal.spec.view import Address, Attachment

NOWHERE = Address(host="127.0.0.1", port=1)


class ShardedPolicyHarness:
    """A membership policy of which all stand who are here. `views` are those that train."""

    def __init__(self, *, wanted=4, lanes=4, **how):
        self.policy = ShardedMembershipPolicy(
            lanes=lanes, wanted_workers=wanted, balance_lanes=False, workers_per_replica=2, **how
        )
        self.now_s = 0.0
        self.views, self.halts, self.sent_away, self.seats = [], [], [], 0
        self.look()

    def look(self):
        self.now_s += SHORTEST_VIEW_S + 0.1
        for order in self.policy.decide(self.now_s):
            if isinstance(order, StartWorkers):
                for _ in range(order.count):
                    self.policy.expect(self.seats)
                    self.seats += 1
            elif isinstance(order, PublishView):
                self.views += [order.view] if order.view.carries else []
                self.halts += [order.view.halt] if order.view.halt else []
                self.sent_away += order.view.leave

    def arrive(self, *seats, can_save=True):
        for seat in seats:
            attachment = Attachment(managed=can_save, can_save=can_save, needs_job=not can_save)
            self.policy.arrived(seat, attachment, address=NOWHERE)
            self.stand(seat, None)
        self.look()
        self.look()

    def stand(self, seat, position, *, saved=False):
        number = self.policy.members[seat].last_view_sent
        self.policy.stopped_at(seat, self.now_s, view=number, position=position, checkpointed=saved)

    def all_stand(self, position, *, saved=True):
        for seat in list(self.policy.members):
            self.stand(seat, position, saved=saved)
        self.look()

    @property
    def rows(self):
        view = self.views[-1]
        in_order = sorted(view.places, key=view.places.__getitem__)
        return [in_order[i : i + 2] for i in range(0, len(in_order), 2)]


def begun(**how):
    told = ShardedPolicyHarness(**how)
    told.arrive(*range(told.seats))
    return told


def test_all_begin_together_and_make_whole_replicas():
    told = ShardedPolicyHarness()
    told.arrive(0, 1, 2)
    assert not told.views
    told.arrive(3)
    assert told.rows == [[0, 1], [2, 3]]
    assert told.views[-1].saver == 0


@pytest.mark.parametrize(
    ("together", "carries"),
    [(True, {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}), (False, {0: [0], 1: [1], 2: [2], 3: [3]})],
)
def test_replicas_share_the_lanes_and_their_ranks_share_them_or_have_the_same(together, carries):
    assert begun(lanes_shared_in_replica=together).views[-1].carries == carries


def test_after_a_death_the_others_go_on_with_fewer_replicas_and_keep_their_parts():
    told = begun()
    told.policy.gone(0)
    told.look()
    assert told.halts == ["now"]
    told.all_stand(position=10)
    assert told.rows == [[2, 1]], "0 had the first part, and so has 2"
    told.arrive(4)
    assert told.halts == ["now", "boundary"], "with 3, it makes a replica"
    told.all_stand(position=20)
    assert len(told.rows) == 2
    assert [told.views[-1].places[seat] % 2 for seat in (2, 1)] == [0, 1]


def test_one_replica_waits_until_it_is_whole():
    told = begun(wanted=2)
    told.policy.gone(1)
    told.look()
    told.all_stand(position=10)
    assert len(told.views) == 1
    told.arrive(2)
    assert told.rows == [[0, 2]]


def test_who_must_leave_stays_until_another_is_there():
    told = begun(wanted=2)
    told.policy.drain(1, "terminated", replace=True)
    told.look()
    assert not told.halts
    told.arrive(2)
    assert told.halts == ["boundary"]
    told.all_stand(position=10)
    assert told.rows == [[0, 2]]
    assert told.sent_away == [1]


def test_nobody_leaves_with_what_was_not_saved():
    """The save at the boundary failed: the same members go on, and try again a little later."""
    told = begun(wanted=2)
    told.policy.drain(1, "terminated", replace=True)
    told.arrive(2)
    told.all_stand(position=10, saved=False)
    assert told.rows == [[0, 1]]
    assert len(told.views) == 2
    assert not told.sent_away
    assert told.halts == ["boundary"]
    told.now_s += SAVE_RETRY_S
    told.look()
    assert told.halts == ["boundary"] * 2
    told.all_stand(position=20)
    assert told.rows == [[0, 2]]
    assert told.sent_away == [1]


def test_who_has_the_same_as_others_may_leave_all_the_same():
    told = begun()
    told.policy.scale(2)
    told.look()
    told.all_stand(position=10, saved=False)
    assert told.rows == [[0, 1]]
    assert sorted(told.sent_away) == [2, 3]


def test_who_leaves_when_another_dies_stays_for_what_it_holds():
    """It may have a copy of what died, and there was no time to save."""
    told = begun(wanted=2)
    told.policy.drain(1, "terminated", replace=True)
    told.policy.gone(0)
    told.look()
    assert told.halts == ["now"]
    told.stand(1, 10)
    told.look()
    assert not told.sent_away
    told.arrive(2, 3)
    assert told.rows == [[2, 1]]
    told.now_s += SAVE_RETRY_S
    told.look()
    told.all_stand(position=20)
    assert told.rows == [[2, 3]]
    assert told.sent_away == [1]


def test_who_holds_nothing_may_leave_at_once():
    told = begun(wanted=2)
    told.arrive(2)
    assert told.sent_away == [2]


def test_the_number_of_workers_stays_a_multiple():
    told = begun()
    assert len(told.policy.scale(3)) == 2
    assert told.policy.wanted_workers == 2
    told.policy.scale(1)
    assert told.policy.wanted_workers == 2


def test_who_cannot_save_stands_by():
    told = begun(wanted=2)
    told.arrive(7, 8, can_save=False)
    told.look()
    assert not told.halts
    assert len(told.views) == 1


def test_no_more_replicas_than_lanes():
    told = begun(wanted=6, lanes=2)
    assert len(told.rows) == 2
