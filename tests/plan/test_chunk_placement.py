"""Tables under any order of facts: nothing is lost, copies come back, bytes are even and few of them move."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal.plan.chunk_placement import ChunkPlacement, ChunksLost
from shoal.spec.chunk_table import ChunkTable, build_pieces
from shoal.spec.view import Address

SMALL = [0, 100, 190, 300, 400, 510, 600, 620]
LARGE = [64 * i for i in range(1001)] + [64 * 1000 + 20]


def at(seat):
    return Address(host="here", port=seat + 1)


# ---- any order of facts ----


class PlacementStateMachine(RuleBasedStateMachine):
    """Servers, what they hold, and drivers that come and go. `holders` follows the tables as servers would: who is in
    the chain stays in sync, who was filled gets in sync, all else is stale from the next table on."""

    @initialize(servers=st.integers(1, 4), backups=st.integers(0, 2), how=st.sampled_from(["table", "ring"]))
    def begin(self, servers, backups, how):
        self.how, self.backups = how, backups
        self.placement = ChunkPlacement(servers=servers, backups=backups, method=how)
        self.seats = 0
        self.starting: list[int] = []
        self.living: list[int] = []
        self.calling: list[int] = []
        self.tables: list[ChunkTable] = []
        self.holders: list[set[int]] | None = None
        self.placement.set_boundaries(SMALL)

    def heed(self):
        """What the driver does after every fact."""
        for _ in range(self.placement.missing_servers()):
            self.starting.append(self.seats)
            self.placement.expect(self.seats)
            self.seats += 1
        match self.placement.decide():
            case ChunkTable() as table:
                self.take(table)
                assert self.placement.decide() is None, "a second thought without a new fact"
            case ChunksLost():
                assert self.holders is not None
                assert not all(self.holders), "everything was still there"
                self.holders = None
                self.placement.reset()
                self.heed()
            case None:
                assert self.holders is None or all(self.holders) or self.calling, "it did not see that all is lost"
        if away := self.placement.releasable_seats():
            self.end(away[0])

    def take(self, table):
        assert not self.tables or table.number > self.tables[-1].number
        assert table.cuts == SMALL
        assert set(table.addresses) <= set(self.living)
        for i, (chain, filling) in enumerate(zip(table.chains, table.filling, strict=True)):
            assert len({*chain, *filling}) == len(chain) + len(filling)
            assert len(chain) <= self.backups + 1
            assert self.holders is None or set(chain) <= self.holders[i], "it leads or backs without the content"
        self.tables.append(table)
        self.holders = [set(chain) for chain in table.chains]

    def end(self, seat):
        self.living.remove(seat)
        self.calling = [other for other in self.calling if other != seat]
        for holders in self.holders or []:
            holders.discard(seat)
        self.placement.gone(seat)
        self.heed()

    @rule(most=st.integers(1, 4))
    def start(self, most):
        self.heed()
        for seat in self.starting[:most]:
            self.starting.remove(seat)
            self.living.append(seat)
            self.placement.arrived(seat, at(seat))
            self.heed()

    @rule()
    def fail_to_start(self):
        if self.starting:
            self.placement.gone(self.starting.pop())
            self.heed()

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def die(self, data):
        self.end(data.draw(st.sampled_from(self.living)))

    @precondition(lambda self: self.living)
    @rule(data=st.data(), replace=st.booleans())
    def drain(self, data, replace):
        self.placement.drain(data.draw(st.sampled_from(self.living)), replace=replace)
        self.heed()

    @rule(servers=st.integers(1, 5))
    def scale(self, servers):
        self.placement.scale(servers)
        self.heed()

    def to_fill(self):
        if not self.tables or self.calling or self.holders is None:
            return []
        table = self.tables[-1]
        ways = zip(table.chains, table.filling, strict=True)
        pairs = {pair for chain, filling in ways for pair in pairwise([*chain, *filling]) if pair[1] in filling}
        return sorted(pair for pair in pairs if set(pair) <= set(self.living))

    @precondition(lambda self: self.to_fill())
    @rule(data=st.data())
    def fill(self, data):
        self.fill_pair(*data.draw(st.sampled_from(self.to_fill())))

    def fill_pair(self, by, seat):
        table = self.tables[-1]
        for i, (chain, filling) in enumerate(zip(table.chains, table.filling, strict=True)):
            if (by, seat) in pairwise([*chain, *filling]) and seat in filling:
                assert by in self.holders[i], "one is to fill that holds nothing"
                self.holders[i].add(seat)
        self.placement.filled(by, seat, table.number)
        self.heed()

    @precondition(lambda self: len(self.tables) > 1)
    @rule(data=st.data())
    def fill_for_an_old_table(self, data):
        old = data.draw(st.sampled_from(self.tables[:-1]))
        for by in self.living:
            for seat in self.living:
                self.placement.filled(by, seat, old.number)
        self.heed()

    @precondition(lambda self: self.holders and not self.calling)
    @rule()
    def another_driver(self):
        self.placement = ChunkPlacement(servers=self.placement.wanted_servers, backups=self.backups, method=self.how)
        self.placement.observe_table(self.tables[-1])  # a worker has seen it
        self.starting = []
        self.calling = list(self.living)
        for seat in self.living:
            self.placement.expect(seat)
        self.heed()

    @precondition(lambda self: self.calling)
    @rule(data=st.data())
    def call(self, data):
        seat = self.calling.pop(data.draw(st.integers(0, len(self.calling) - 1)))
        self.placement.arrived(seat, at(seat))
        self.placement.observe_table(data.draw(st.sampled_from(self.tables)))
        self.heed()

    @precondition(lambda self: self.holders and not self.calling)
    @rule()
    def a_table_of_another_driver_turns_up(self):
        number = self.tables[-1].number + 3
        self.placement.observe_table(self.tables[0].model_copy(update={"number": number}))
        self.heed()
        assert self.tables[-1].number > number

    @precondition(lambda self: self.tables)
    @rule()
    def say_all_again(self):
        before = len(self.tables)
        self.placement.set_boundaries(SMALL)
        self.placement.observe_table(self.tables[-1])
        for seat in set(self.living) - set(self.calling):
            self.placement.arrived(seat, at(seat))
        self.heed()
        assert len(self.tables) == before

    @invariant()
    def nothing_is_held_by_the_dead(self):
        for holders in self.holders or []:
            assert holders <= set(self.living)

    def teardown(self):
        """In the end all comes to rest: as many servers and copies as are wanted, and who leaves has left."""
        if not hasattr(self, "placement"):
            return
        self.heed()
        for _ in range(200):
            if self.calling:
                seat = self.calling.pop()
                self.placement.arrived(seat, at(seat))
                self.heed()
            elif self.starting:
                self.living.append(seat := self.starting.pop())
                self.placement.arrived(seat, at(seat))
                self.heed()
            elif pairs := self.to_fill():
                self.fill_pair(*pairs[0])
        table = self.tables[-1]
        assert len(self.living) >= self.placement.wanted_servers
        assert not any(table.filling)
        assert {len(chain) for chain in table.chains} == {min(self.backups + 1, len(self.living))}
        assert not self.placement.releasable_seats()


PlacementStateMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestAnyOrder = PlacementStateMachine.TestCase


# ---- even, and calm ----


def placed(servers, *, backups=0, how="table", cuts=LARGE):
    """A run whose servers hold everything."""
    placement = ChunkPlacement(servers=servers, backups=backups, method=how)
    placement.set_boundaries(cuts)
    for seat in range(servers):
        assert placement.decide() is None
        placement.expect(seat)
        placement.arrived(seat, at(seat))
    assert isinstance(placement.decide(), ChunkTable)
    return placement


def fill_all(placement):
    """Everything is filled as it is asked for. The bytes that were sent for it."""
    sent = 0
    while any((table := placement.chunk_table).filling):
        asked = {
            (chain[-1], seat): 0 for chain, filling in zip(table.chains, table.filling, strict=True) for seat in filling
        }
        for i, (chain, filling) in enumerate(zip(table.chains, table.filling, strict=True)):
            for seat in filling:
                asked[chain[-1], seat] += table.cuts[i + 1] - table.cuts[i]
        pair = random.Random(len(asked)).choice(sorted(asked))
        sent += asked[pair]
        placement.filled(*pair, table.number)
        assert isinstance(placement.decide(), ChunkTable)
    return sent


def loads(table, *, led=False):
    """Bytes that each seat holds, or is primary of."""
    load = dict.fromkeys(table.addresses, 0)
    for (start, stop), chain in zip(pairwise(table.cuts), table.chains, strict=True):
        for seat in chain[:1] if led else chain:
            load[seat] += stop - start
    return list(load.values())


def unevenness(values):
    return max(values) * len(values) / sum(values)


def churn(placement, rng, rounds):
    """Servers come, die and are drained, one after the other; yields the part of all bytes that was sent."""
    new = max(placement.chunk_table.addresses) + 1
    for _ in range(rounds):
        live = sorted(placement.chunk_table.addresses)
        n = len(live)
        if n > 3 and rng.random() < 0.5:
            seat = rng.choice(live)
            if placement.backups and rng.random() < 0.5:
                placement.gone(seat)
                placement.wanted_servers -= 1
            else:
                placement.drain(seat)
            most = 1 / n + 0.2
        else:
            placement.scale(n + 1)
            assert placement.missing_servers() == 1
            placement.arrived(new, at(new))
            new, most = new + 1, 1 / (n + 1) + 0.2
        assert isinstance(placement.decide(), ChunkTable)
        sent = fill_all(placement)
        for seat in placement.releasable_seats():
            placement.gone(seat)
            assert placement.decide() is None
        everything = sum(loads(placement.chunk_table))
        yield sent / everything, most


@given(st.integers(1, 9), st.integers(0, 2), st.integers(100, 400), st.integers(1, 3000))
@settings(max_examples=40, deadline=None)
def test_the_first_table_is_even(servers, backups, chunks, tail):
    cuts = [1000 * i for i in range(chunks + 1)]
    table = placed(servers, backups=backups, cuts=[*cuts, cuts[-1] + tail]).chunk_table
    for led in (True, False):
        found = loads(table, led=led)
        assert unevenness(found) <= 1.05 or max(found) - min(found) <= 1000 + tail
    assert not any(table.filling)
    assert len(build_pieces(table)) <= chunks // 100 + servers * (backups + 1) + 2


@pytest.mark.parametrize("backups", [0, 1, 2])
def test_changes_move_little_and_leave_it_even(backups):
    for seed in range(2):
        placement = placed(3, backups=backups)
        for moved, most in churn(placement, random.Random(seed), 9):
            assert moved <= most
            assert unevenness(loads(placement.chunk_table, led=True)) <= 1.05
            assert unevenness(loads(placement.chunk_table)) <= 1.05


@pytest.mark.parametrize("backups", [0, 1])
def test_a_ring_moves_little_and_is_less_even(backups):
    placement = placed(4, backups=backups, how="ring")
    for moved, most in churn(placement, random.Random(1), 10):
        assert moved <= most
        assert 1.05 < unevenness(loads(placement.chunk_table, led=True)) < 1.6


# ---- one by one ----


def test_a_chunk_stays_where_it_is_until_the_next_has_it():
    placement = placed(1, cuts=[0, 100, 200, 210])
    placement.scale(2)
    placement.arrived(5, at(5))
    on_the_way = placement.decide()
    assert on_the_way.chains == [[0], [0], [0]]
    assert sum(map(len, on_the_way.filling)) == 1
    placement.filled(0, 5, on_the_way.number)
    there = placement.decide()
    assert sorted(there.chains) in ([[0], [0], [5]], [[0], [5], [5]])
    assert not any(there.filling)


def test_who_leads_goes_on_until_the_next_can():
    placement = placed(2, backups=1)
    before = placement.chunk_table
    placement.scale(3)
    placement.arrived(2, at(2))
    on_the_way = placement.decide()
    fill_all(placement)
    for old, middle, new in zip(before.chains, on_the_way.chains, placement.chunk_table.chains, strict=True):
        assert middle[0] in (old[0], new[0])


def test_what_was_filled_under_an_older_table_does_not_count():
    placement = placed(1, cuts=[0, 100, 200, 210])
    placement.scale(2)
    placement.arrived(5, at(5))
    older = placement.decide()
    placement.scale(3)
    placement.arrived(6, at(6))
    newer = placement.decide()
    placement.filled(0, 5, older.number)
    placement.filled(0, 6, older.number)
    assert placement.decide() is None
    placement.filled(0, 6, newer.number)
    assert isinstance(placement.decide(), ChunkTable)
    placement.scale(4)
    placement.arrived(7, at(7))  # 0 goes on to fill 5, and says so anew
    placement.decide()
    assert all(5 not in chain for chain in placement.chunk_table.chains)


def test_a_backup_leads_at_once_when_the_primary_dies():
    placement = placed(2, backups=1, cuts=[0, 100, 200, 210])
    placement.gone(0)
    assert placement.missing_servers() == 1
    assert placement.decide().chains == [[1], [1], [1]]
    assert placement.decide() is None


def test_one_that_was_filled_by_a_dead_one_counts():
    placement = placed(1, backups=1, cuts=[0, 100, 110])
    placement.scale(2)
    placement.arrived(1, at(1))
    table = placement.decide()
    placement.gone(0)
    placement.filled(0, 1, table.number)
    assert placement.decide().chains == [[1], [1]]


def test_what_nobody_holds_is_lost_until_all_is_forgotten():
    placement = placed(3, backups=1)
    number = placement.chunk_table.number
    placement.gone(0)
    assert isinstance(placement.decide(), ChunkTable)
    placement.gone(1)
    assert isinstance(placement.decide(), ChunksLost)
    assert isinstance(placement.decide(), ChunksLost)
    placement.reset()
    assert placement.missing_servers() == 2
    assert placement.decide() is None
    placement.arrived(3, at(3))
    placement.arrived(4, at(4))
    table = placement.decide()
    assert table.number > number + 1
    assert set(table.addresses) == {2, 3, 4}
    assert not any(table.filling)


def test_a_chain_is_as_long_as_there_are_servers():
    placement = placed(2, backups=2, cuts=[0, 100, 110])
    assert {len(chain) for chain in placement.chunk_table.chains} == {2}
    placement.scale(3)
    placement.arrived(2, at(2))
    assert isinstance(placement.decide(), ChunkTable)
    fill_all(placement)
    assert {len(chain) for chain in placement.chunk_table.chains} == {3}


def test_one_that_leaves_is_dispensable_when_others_have_what_it_holds():
    placement = placed(2, cuts=[0, 100, 200, 210])
    placement.drain(0)
    assert placement.missing_servers() == 0
    assert isinstance(placement.decide(), ChunkTable)
    assert placement.releasable_seats() == []
    fill_all(placement)
    assert placement.releasable_seats() == [0]


def test_one_that_leaves_is_not_kept_as_a_copy_too_many():
    placement = placed(2, backups=2, cuts=[0, 100, 110])
    placement.drain(1)
    assert placement.decide().chains == [[0], [0]]
    assert placement.releasable_seats() == [1]


def test_one_that_is_replaced_stays_a_copy_until_its_replacement_is_one():
    placement = placed(3, backups=2, cuts=[0, 100, 110])
    placement.drain(0, replace=True)
    placement.decide()
    assert {len(chain) for chain in placement.chunk_table.chains} == {3}
    assert placement.releasable_seats() == []
    placement.arrived(3, at(3))
    assert isinstance(placement.decide(), ChunkTable)
    fill_all(placement)
    assert {tuple(sorted(chain)) for chain in placement.chunk_table.chains} == {(1, 2, 3)}
    assert placement.releasable_seats() == [0]


def test_the_last_one_leaves_when_another_has_come():
    placement = placed(1, cuts=[0, 100, 110])
    placement.drain(0)
    assert placement.missing_servers() == 1
    assert placement.decide() is None
    placement.arrived(1, at(1))
    assert isinstance(placement.decide(), ChunkTable)
    fill_all(placement)
    assert placement.chunk_table.chains == [[1], [1]]
    assert placement.releasable_seats() == [0]


def test_one_that_calls_again_is_still_wanted():
    placement = ChunkPlacement(servers=1, backups=0)
    placement.arrived(0, at(0))
    placement.arrived(0, at(0))
    placement.set_boundaries([0, 100, 110])
    assert placement.releasable_seats() == []
    assert placement.decide().chains == [[0], [0]]


def test_one_that_comes_too_late_leaves_again():
    placement = placed(2)
    placement.scale(3)
    placement.expect(2)
    placement.scale(2)
    placement.arrived(2, at(2))
    assert placement.decide() is None
    assert placement.releasable_seats() == [2]


def test_another_driver_waits_for_those_that_hold_something():
    earlier = placed(3, backups=1).chunk_table
    placement = ChunkPlacement(servers=3, backups=1)
    for seat in (0, 1, 2, 7):
        placement.expect(seat)
    placement.observe_table(earlier)
    for seat in (0, 1):
        placement.arrived(seat, at(seat))
        assert placement.decide() is None
    placement.gone(2)  # it died with the driver; 7 is only being started
    table = placement.decide()
    assert table.number > earlier.number + 1
    assert set(table.addresses) == {0, 1}
